"""Imports without the garbage collector, which would look at half a million objects for nothing."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compress.core.collecting import uncollected

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def quickly() -> Iterator[None]:
    """Keep the garbage collector from what is imported in a block, now and later: it all stays."""
    with uncollected():
        try:
            yield
        finally:
            gc.freeze()
