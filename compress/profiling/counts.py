"""Counts of what a process did; kept in :mod:`compress.common.counts`, which every layer imports."""

from compress.common.counts import count, counted

__all__ = ["count", "counted"]
