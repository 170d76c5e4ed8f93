"""Checks that a sliced model answers like its masked twin."""
