"""Replacing an attribute of a library in a block, whichever threads do so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_lock = threading.Lock()
_values: dict[tuple[Any, str], list[Any]] = {}
"""Owner and name → the library's own value, and those of the blocks that have not ended."""


@contextmanager
def patched_attribute(owner: type | ModuleType, name: str, value: Any) -> Iterator[None]:
    """Replace a library's attribute in a block; do nothing where this release does not have it.

    Blocks of several threads may end in any order: the attribute is that of the block that began
    last of those that go on, and the library's own after all of them.
    """
    if name not in vars(owner):
        yield
        return
    entry = [value]  # no other block's, even of an equal value
    with _lock:
        entries = _values.setdefault((owner, name), [[vars(owner)[name]]])
        entries.append(entry)
        setattr(owner, name, value)
    try:
        yield
    finally:
        with _lock:
            entries[:] = [other for other in entries if other is not entry]
            setattr(owner, name, entries[-1][0])
            if len(entries) == 1:
                del _values[owner, name]
