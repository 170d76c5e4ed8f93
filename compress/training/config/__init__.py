"""Settings of training; imports no torch."""
