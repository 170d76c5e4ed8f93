"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

import ctypes
import gc
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROCESS = Path("/proc/self")
MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(?P<file>.*)")
LIBRARY = re.compile(r"/.*\.so[.\d]*")


def memory_kib(key: str) -> int:
    """Return `VmRSS`, what is resident now, or `VmHWM`, the most that was."""
    return int((PROCESS / "status").read_text().partition(f"{key}:")[2].split()[0])


def reset_peak() -> None:
    """Let the peak count from here."""
    (PROCESS / "clear_refs").write_text("5")


def library_kib() -> dict[str, int]:
    """Return how much of each shared library's file has been read into this process so far."""
    found: dict[str, int] = {}
    for file, key, value in _mapped():
        if LIBRARY.fullmatch(file):
            # What was written to since is this process's own, and no page of the file.
            sign = {"Rss": 1, "Anonymous": -1}.get(key, 0)
            found[file] = found.get(file, 0) + sign * value
    return found


def release_memory() -> None:
    """Collect what graphs hold in circles, and let the C library return what it keeps for later.

    What was let go would else lie beside what comes next, or be taken for it and not be counted.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


def _mapped() -> Iterator[tuple[str, str, int]]:
    """Yield for each mapping the file, a figure's name, and its KiB."""
    file = ""
    with (PROCESS / "smaps").open() as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key in ("Rss", "Anonymous"):
                yield file, key, int(value.split()[0])
            elif found := MAPPING.match(line):
                file = found["file"]
