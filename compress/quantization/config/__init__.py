"""Data types, backends and calibration settings; imports no torch."""
