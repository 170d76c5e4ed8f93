"""Seconds that calls take, and whether other processes made them longer."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

STAT = Path("/proc/stat")
HELPED, CLOCK_SECONDS = 0.05, 5e-6
"""How much longer than the calling thread the whole process may compute in a call of one thread, as
a share and as the time of reading clocks."""
SPARE = 0.15
"""Processors that other processes may take of those that calls need: the system's own work."""


class CallTimer:
    """Times calls, and knows whether other processes made them longer.

    What one thread computes takes that thread's CPU time, which stands still while another process
    has the processor, so that a short disturbance changes nothing. Where several threads, another
    process or a GPU compute, CPU time is no latency: these calls take their wall time.

    If other processes left too few processors free all the while, the times say nothing: CPU time
    grows too, by shared caches and memory, and not for every model alike (an eager ResNet-20 took
    1.4 times as long beside eight busy processes on two processors, its ONNX file 1.1 times).
    """

    def __init__(self, threads: int) -> None:
        """Begin to count what other processes take, beside calls of so many CPU threads."""
        self.threads = threads
        torch: Any = sys.modules.get("torch")
        # For a GPU the calling thread may wait without sleeping.
        has_gpu = torch is not None and torch.cuda.is_available()
        self._computes_alone = threads == 1 and not has_gpu
        self._processors = os.sched_getaffinity(0)
        self._start = self._counters()

    def call(self, function: Callable[[], T]) -> tuple[T, float]:
        """Call a function, and return its result and the seconds that it took."""
        slept = getrusage(RUSAGE_THREAD).ru_nvcsw
        wall, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
        result = function()
        thread = time.thread_time() - thread
        process = time.process_time() - process
        wall = time.perf_counter() - wall
        slept = getrusage(RUSAGE_THREAD).ru_nvcsw - slept
        is_helped = process - thread > HELPED * thread + CLOCK_SECONDS
        if self._computes_alone and not is_helped and not slept:
            return result, thread
        return result, wall

    def _doubt(self) -> str:
        """Return why the times say nothing; empty where they do."""
        wall, busy, own = (b - a for a, b in zip(self._start, self._counters(), strict=True))
        others, processors = max(0.0, busy - own) / max(wall, 1e-9), len(self._processors)
        if others + min(self.threads, processors) <= processors + SPARE:
            return ""
        return f"other processes took {others:.2g} of {processors} processors"

    doubt = property(_doubt)
    """Why the times say nothing; empty where they do."""

    def _counters(self) -> tuple[float, float, float]:
        """Return wall time, and CPU time of all processes and of this one, in seconds."""
        names, ticks = {f"cpu{number}" for number in self._processors}, 0
        try:
            lines = STAT.read_text().splitlines()
        except OSError:
            lines = []
        for name, *counts in filter(None, map(str.split, lines)):
            if name in names:
                user, nice, system, _idle, _waiting, *rest = map(int, counts[:8])
                ticks += user + nice + system + sum(rest)
        return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()
