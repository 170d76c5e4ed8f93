"""Processor time that tests take, which says what they cost however busy the machine is."""

import contextlib
import os
import time

TICKS = os.sysconf("SC_CLK_TCK")
BRIEF = 0.2
"""Seconds: what took less has started no process that matters; asking for all takes a while."""


class Used:
    """The processor time that was used until now, and of it by each part of the tests."""

    def __init__(self) -> None:
        self._total = self._own = 0.0

    def until_now(self, duration: float) -> tuple[float, float]:
        """Return the time of the first part, which is that of a worker's start, or of a later."""
        own, self._own = self._own, time.process_time()
        before = self._total
        if before and duration < BRIEF:
            self._total += self._own - own
        else:
            self._total = seconds()
        used = self._total - before
        return (0.0, used) if before else (used, 0.0)


def seconds() -> float:
    """Return the processor time of this process and of all that it started, ended ones included."""
    total, family = 0, ["self"]
    for member in family:
        for task in _tasks(member):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                family += _read(f"/proc/{member}/task/{task}/children").split()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = _read(f"/proc/{member}/stat").rpartition(")")[2].split()
            total += sum(map(int, fields[11:15]))
    return total / TICKS


def _tasks(process: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return os.listdir(f"/proc/{process}/task")  # noqa: PTH208 - as in `_read`
    return []


def _read(path: str) -> str:
    """Read a file without `pathlib` and `open`, which some tests replace."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 16).decode()
    finally:
        os.close(file)
