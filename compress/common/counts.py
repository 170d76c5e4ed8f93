"""Counts of what a process did: `traces`, `forwards.onnx.calls`, `hashed.bytes`; see --profile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

# Times vary with the machine, counts do not: a test can hold a pipeline to the forwards it makes.
# `+=` on a Counter's entry reads and writes in two steps, so threads would lose counts.
_lock = threading.Lock()
_counts: Counter[str] = Counter()
_pauses = 0


def count(name: str, amount: int = 1) -> None:
    """Add `amount` to the count `name` of this process; callable from any thread."""
    if _pauses:
        return
    with _lock:
        _counts[name] += amount


def counted() -> dict[str, int]:
    """Return all counts of this process so far, by name; the difference of two is a stretch."""
    with _lock:
        return dict(sorted(_counts.items()))


@contextmanager
def counting_paused() -> Iterator[None]:
    """Count nothing in a block, where calls are timed: counting takes a microsecond of each."""
    global _pauses
    _pauses += 1
    try:
        yield
    finally:
        _pauses -= 1
