"""Least-squares refit and BatchNorm statistics after a cut."""
