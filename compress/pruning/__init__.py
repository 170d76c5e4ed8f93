"""Removing whole channels, heads and neurons; imports no torch until a model is touched."""
