"""A decoder trained on this machine's own text, and what compression does to it."""
