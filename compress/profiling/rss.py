"""Resident memory of this process, read from Linux's ``/proc/self``, or asked of another one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

PROCESS = Path("/proc/self")
MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(?P<file>.*)")
LIBRARY = re.compile(r"/.*\.so[.\d]*")


def memory_kib(key: str) -> int:
    """Return `VmRSS`, the resident memory, or `VmHWM`, its peak, in KiB."""
    return int((PROCESS / "status").read_text().partition(f"{key}:")[2].split()[0])


def reset_peak() -> None:
    """Reset `VmHWM` to the memory that is resident now."""
    (PROCESS / "clear_refs").write_text("5")


def library_kib() -> dict[str, int]:
    """Return how many KiB of each shared library's file are resident in this process."""
    resident: dict[str, int] = {}
    file = ""
    with (PROCESS / "smaps").open() as lines:
        for line in lines:
            key, _, value = line.partition(":")
            if key in ("Rss", "Anonymous"):
                if LIBRARY.fullmatch(file):
                    # Pages that were written to belong to this process and not to the file.
                    sign = 1 if key == "Rss" else -1
                    resident[file] = resident.get(file, 0) + sign * int(value.split()[0])
            elif mapping := MAPPING.match(line):
                file = mapping["file"]
    return resident


class MeasurementRequest(NamedTuple):
    """An artifact to measure, and the environment of the process that requests it."""

    module: str
    name: str
    """Module and qualified name of the artifact's class."""
    path: str
    device: str
    threads: int
    inputs: str
    """File of the model's inputs, a list of batches."""
    hashed: list[list[str | int]]
    """Versions of the artifact's files that need not be hashed again."""
    imports: tuple[str, ...]
    """Modules that opening the artifact imports, as far as known."""
    folder: str
    """Working directory; empty where it was removed."""
    search: list[str]
    """``sys.path``."""
    environment: dict[str, str]
