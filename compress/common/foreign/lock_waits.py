"""Deadlines for locks of libraries, which wait for ever and do not say for what."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.common.errors import StageFailed
from compress.common.foreign.patching import patched_attribute

LONGEST_WAIT = 600.0
"""Seconds: more than a library needs to compile its C++ code while other processes wait for it."""
SECONDS_TO_NOTICE = 5.0
log = logging.getLogger(__name__)


@contextmanager
def bounded_lock_waits() -> Iterator[None]:
    """End waits for lock files of PyTorch's C++ extensions and of filelock in a block.

    DeepSpeed compiles its optimizers as such extensions, once for all processes; the file of one
    that was killed meanwhile stays. Hugging Face's libraries and TorchInductor use filelock.

    Raises:
        StageFailed: a lock was not released in time; the message names it.
    """
    from filelock import BaseFileLock, Timeout
    from torch.utils.file_baton import FileBaton

    acquire = BaseFileLock.acquire

    def wait(baton: FileBaton) -> None:
        lock = Path(baton.lock_file_path)
        started, noticed = time.monotonic(), False
        while True:
            try:
                age = time.time() - lock.stat().st_mtime
            except FileNotFoundError:
                return
            waited = time.monotonic() - started
            if max(age, waited) > LONGEST_WAIT:
                raise StageFailed(
                    f"{lock}: has been there for {max(age, waited):.0f} s, longer than a library "
                    "is compiled; a killed process has left it: remove it"
                )
            if not noticed and waited > SECONDS_TO_NOTICE:
                noticed = True
                _announce(lock)
            time.sleep(baton.wait_seconds)

    def acquire_in_time(lock: Any, timeout: float | None = None, *rest: Any, **named: Any) -> Any:
        limit = lock.timeout if timeout is None else timeout
        if limit >= 0 or named.get("blocking") is False or not lock.blocking:
            return acquire(lock, timeout, *rest, **named)
        try:
            return acquire(lock, min(SECONDS_TO_NOTICE, LONGEST_WAIT), *rest, **named)
        except Timeout:
            _announce(lock.lock_file)
        try:
            return acquire(lock, LONGEST_WAIT, *rest, **named)
        except Timeout:
            raise StageFailed(
                f"{lock.lock_file}: another process has held this lock for more than "
                f"{LONGEST_WAIT:g} s; end it"
            ) from None

    with (
        patched_attribute(FileBaton, "wait", wait),
        patched_attribute(BaseFileLock, "acquire", acquire_in_time),
    ):
        yield


def _announce(lock: Path | str) -> None:
    log.warning("waiting for %s, which another process holds (at most %g s)", lock, LONGEST_WAIT)
