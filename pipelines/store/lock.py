"""One run at a time in a store: a lock that dying gives back."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compress.common.errors import PipelineInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LOCK = "lock"


@contextmanager
def at_rest(out: Path) -> Iterator[bool]:
    """Keep runs from beginning in a directory for a moment; whether none is at work there."""
    try:
        descriptor = os.open(out / ".store" / LOCK, os.O_RDONLY)
    except OSError:  # only the results were brought here, or nothing can be written anyway
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        nobody_works = True
    except BlockingIOError:
        nobody_works = False
    try:
        yield nobody_works
    finally:
        os.close(descriptor)


def lock(root: Path, announce: Callable[[str], None]) -> int:
    """Return the descriptor that holds a store's lock; closing it, or dying, gives it back."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            _wait_for(descriptor, root, announce)
            if _is_at(descriptor, root / LOCK):
                return descriptor
            os.close(descriptor)  # the store was removed meanwhile, and perhaps made anew
            root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PipelineInvalid(
            f"{root.parent}: cannot be written ({error.strerror}); choose another with --out"
        ) from None


def _wait_for(descriptor: int, root: Path, announce: Callable[[str], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        announce(f"waiting for another run in {root.parent} to end (Ctrl-C gives up)")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
