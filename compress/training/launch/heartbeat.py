"""Signs of life on a shared file system: a small file that a process writes again and again.

Other machines see neither a process nor its end; they see that its file no longer changes. Clocks
of several machines are never compared: whoever listens measures the silence by its own.
"""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

THIS_PROCESS = uuid.uuid4().hex
"""Tells this process from every other one that ever shares a directory with it."""
SECONDS_BETWEEN_BEATS = 1.0
SECONDS_TO_SILENCE = 60.0
"""Longer than a network file system keeps what it knows of a file."""


@contextmanager
def beating(file: Path, who: str = THIS_PROCESS) -> Iterator[None]:
    """Give signs of life in a file during a block, from a thread; the file goes with its end.

    Args:
        file: where they are given.
        who: whose they are; :attr:`Pulse.who` tells it to whoever listens.
    """
    _beat(file, who, 0)
    over = threading.Event()
    thread = threading.Thread(target=_beat_until, args=(file, who, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        file.unlink(missing_ok=True)


def _beat_until(file: Path, who: str, over: threading.Event) -> None:
    count = 0
    while not over.wait(SECONDS_BETWEEN_BEATS):
        count += 1
        try:
            _beat(file, who, count)
        except OSError:
            continue  # a full disk for a moment is no death


def _beat(file: Path, who: str, count: int) -> None:
    # In place: a renamed file may be seen late where directories are cached, an opened one is not.
    file.write_text(f"{who} {count}\n", encoding="utf-8")


class Pulse:
    """What is heard of another process."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.beats = 0
        """Changes heard so far; a file that a dead process left never changes."""
        self.who = ""
        """Who gave the last sign that was heard."""
        self._last = self._read()
        self._heard = time.monotonic()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last change, as far as :meth:`listen` was called."""
        return time.monotonic() - self._heard

    def listen(self) -> None:
        """Look whether the file has changed."""
        found = self._read()
        if found and found != self._last:
            self.beats += 1
            self.who = found.partition(" ")[0]
            self._last, self._heard = found, time.monotonic()

    def _read(self) -> str:
        try:
            return self.file.read_text(encoding="utf-8")
        except OSError:
            return ""
