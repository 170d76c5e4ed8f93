"""Counts of what a process did, of :mod:`compress.common.counts`."""

from compress.common.counts import count, counted

__all__ = ["count", "counted"]
