"""What a run costs, counted by stage: `compress run --profile`."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from compress.common.config import Settings
from compress.common.counts import count, counted

STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"})
"""Audit events of a process's start."""
CPU_SECONDS = "cpu_seconds"


class StageProfile(Settings):
    """What one stage costs."""

    run: dict[str, float] = {}
    """Counts of making its artifact; empty where it was cached."""
    evaluation: dict[str, float] = {}
    """Counts of its gates and measurements."""


class RunProfile(Settings):
    """What a run costs: CPU seconds of this process and its children, and counts of its work.

    `traces` are calls of `torch.export`; `forwards.<kind>.calls` and `.rows` those of artifacts
    in this process, by their kind, and `forwards.timed.calls` those whose time was measured, with
    their warm-up; `hashed.bytes` of files and data; `read.bytes`
    and `written.bytes` what the process read and wrote, cached by the system or not; `processes`
    those that it started. Of other processes only CPU time is counted.
    """

    total: dict[str, float]
    """Of all stages, and of what is between them."""
    stages: dict[str, StageProfile] = Field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Yield a table in lines: counts by stage, run and evaluation apart, and the total."""
        columns = {
            f"{name} {part}": found
            for name, stage in self.stages.items()
            for part, found in (("run", stage.run), ("evaluation", stage.evaluation))
            if found
        }
        columns["total"] = self.total
        width = max(map(len, columns))
        for name, found in columns.items():
            counts = (f"{k.replace('_', ' ')} {_readable(k, x)}" for k, x in found.items())
            yield f"{name:<{width}}  {', '.join(counts)}"


class Profiler:
    """Counts what a run does, by stage; without effect where it is off."""

    def __init__(self, *, is_on: bool) -> None:
        """Begin to count, if it is on."""
        self.is_on = is_on
        self._stages: dict[str, dict[str, dict[str, float]]] = {}
        if is_on:
            _count_starts()
            self._start = _now()

    @contextmanager
    def section(self, stage: str, part: str) -> Iterator[None]:
        """Count a block as the `run` or the `evaluation` of a stage."""
        if not self.is_on:
            yield
            return
        start = _now()
        try:
            yield
        finally:
            parts = self._stages.setdefault(stage, {})
            total = Counter(parts.get(part, {}))
            total.update(_difference(start, _now()))
            parts[part] = dict(total)

    def profile(self) -> RunProfile | None:
        """Return what was counted so far; None where it is off."""
        if not self.is_on:
            return None
        total = _difference(self._start, _now())
        return RunProfile.model_validate({"total": total, "stages": self._stages})


@cache
def _count_starts() -> None:
    """Count the processes that this one starts from now on: an audit hook cannot be removed."""

    def audit(event: str, _: tuple[Any, ...]) -> None:
        if event in STARTS:
            count("processes")

    sys.addaudithook(audit)


def _now() -> dict[str, float]:
    found: dict[str, float] = {CPU_SECONDS: _cpu_seconds(), **counted()}
    with suppress(OSError, ValueError):  # Linux alone has it
        lines = Path("/proc/self/io").read_text().splitlines()
        values = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
        found |= {"read.bytes": values["rchar"], "written.bytes": values["wchar"]}
    return found


def _cpu_seconds() -> float:
    """Return CPU seconds of this process and of its children, those that still run included."""
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    running = [os.getpid()]
    while running:
        with suppress(OSError):
            for task in Path(f"/proc/{running.pop()}/task").iterdir():
                for pid in (task / "children").read_text().split():
                    running.append(int(pid))
                    # After the name, which may hold blanks: the state is the third field.
                    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    ticks = sum(map(int, stat[11:15]))
                    seconds += ticks / os.sysconf("SC_CLK_TCK")
    return seconds


def _difference(start: dict[str, float], end: dict[str, float]) -> dict[str, float]:
    changes = {name: value - start.get(name, 0) for name, value in end.items()}
    return {name: round(value, 2) for name, value in changes.items() if value}


def _readable(what: str, value: float) -> str:
    if what.endswith(".bytes"):
        return f"{value / 1e6:.1f} MB"
    return f"{value:.1f}" if what == CPU_SECONDS else f"{value:g}"
