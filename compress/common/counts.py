"""Counts of what a process did: traces, forwards, bytes hashed; for `--profile` and for tests.

Times vary with the machine, counts do not: a test can hold a pipeline to the number of forwards it
makes. Names are dotted, the kind of work first: `traces`, `forwards.onnx.calls`, `hashed.bytes`.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

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


_watchers = 0


@contextmanager
def calls_counted() -> Iterator[None]:
    """Count each call of models that are opened in a block, as `forwards.<kind>.calls` and `.rows`.

    Elsewhere they are not, as counting adds a microsecond to a call, whose time may be measured.
    """
    global _watchers
    _watchers += 1
    try:
        yield
    finally:
        _watchers -= 1


def counts_calls() -> bool:
    """Whether calls of models that are opened now are counted."""
    return _watchers > 0
