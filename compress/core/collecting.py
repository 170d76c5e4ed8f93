"""When the garbage collector looks, and at what: libraries are many objects, and all stay."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def uncollected() -> Iterator[None]:
    """Let the garbage collector wait: it would look again and again at what an import makes."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def only_new() -> Iterator[None]:
    """Let the garbage collector look, in a block, at what is made there, and not at the rest.

    Each look at all that torch and its exporters are takes a third of a second, and an export has
    several looked. What the block leaves in circles is gone at its end.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()
