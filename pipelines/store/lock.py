"""One run at a time in a store: a file lock, which ends with the processes that hold it."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout, lock_descriptor

from compress.common.errors import PipelineInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LOCK = "lock"


@contextmanager
def keep_idle(out: Path) -> Iterator[bool]:
    """Keep runs from starting in a results folder during a block; yield whether none runs there."""
    try:
        # Read only, so that results of another user can be looked at.
        descriptor = os.open(out / ".store" / LOCK, os.O_RDONLY)
    except OSError:  # only the results were copied here, or nothing can be written anyway
        yield True
        return
    try:
        yield lock_descriptor(descriptor, blocking=False)
    finally:
        os.close(descriptor)


@contextmanager
def store_lock(root: Path, announce: Callable[[str], None]) -> Iterator[int]:
    """Hold a store's lock during a block; announce and wait while another run holds it.

    Yields the descriptor that holds the lock. Worker processes inherit it, so that the workers of a
    killed run keep the store locked until they have ended.
    """
    descriptors: list[int] = []
    # Without flock, an existing file would be the lock, and a killed run would hold it for ever.
    lock = FileLock(root / LOCK, mode=0o644, fallback_to_soft=False, on_acquired=descriptors.append)
    blocking = False
    try:
        while not descriptors:
            root.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=blocking)
            except Timeout:
                announce(f"waiting for another run in {root.parent} to end (Ctrl-C gives up)")
                blocking = True
            except FileNotFoundError:
                continue  # the store was removed while this run waited
    except OSError as error:
        raise PipelineInvalid(
            f"{root.parent}: cannot be written ({error.strerror}); choose another with --out"
        ) from None
    try:
        yield descriptors[0]
    finally:
        lock.release()
