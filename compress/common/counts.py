"""Counts of what a process did: traces, forwards, bytes hashed; for `--profile` and for tests.

Times vary with the machine, counts do not: a test can hold a pipeline to the number of forwards it
makes. Names are dotted, the kind of work first: `traces`, `forwards.onnx.calls`, `hashed.bytes`.
"""

from __future__ import annotations

import threading
from collections import Counter

# `+=` on a Counter's entry reads and writes in two steps, so threads would lose counts.
_lock = threading.Lock()
_counts: Counter[str] = Counter()


def count(name: str, amount: int = 1) -> None:
    """Add `amount` to the count `name` of this process; callable from any thread."""
    with _lock:
        _counts[name] += amount


def counted() -> dict[str, int]:
    """Return all counts of this process so far, by name; the difference of two is a stretch."""
    with _lock:
        return dict(sorted(_counts.items()))
