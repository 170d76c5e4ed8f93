"""What a training costs in time and memory, measured on every rank while it runs."""

from __future__ import annotations

import logging
import os
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compress.training.checkpoint.metadata import Epoch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from compress.data.splits import Batch
    from compress.training.distributed.base import Strategy
    from compress.training.loop.trainer import Job

log = logging.getLogger(__name__)


class EpochMetrics(Epoch):
    """An epoch and what it cost: figures that differ from run to run, and are never sealed."""

    samples_per_second: float | None = None
    """Over all processes, in the steps; validation is left out."""
    tokens_per_second: float | None = None
    """The same for inputs that are whole numbers by batch and length; padding is counted."""
    peak_mebibytes: tuple[float, ...] = ()
    """Most memory of each process so far: of its CUDA device, else what its resident set has grown
    by since the training began."""

    def speed(self) -> str:
        """Return the speed in words."""
        what, rate = "samples", self.samples_per_second or 0.0
        if self.tokens_per_second:
            what, rate = "tokens", self.tokens_per_second
        return f"{rate:,.0f} {what}/s"

    def cost(self) -> str:
        """Return speed and memory in words."""
        peaks = " ".join(f"{peak:.0f}" for peak in self.peak_mebibytes)
        return f"{self.speed()}, peak MiB by rank: {peaks}"


class StepMetrics:
    """The clock of one rank's epochs."""

    def __init__(self, job: Job, strategy: Strategy, profiler: Any = None) -> None:
        """Take a training; the profiler is told of each step."""
        self.device, self.strategy, self.profiler = job.device, strategy, profiler
        self.before_mebibytes = 0.0 if on_cuda(job.device) else resident_mebibytes("VmRSS")

    def steps(self, steps: Iterable[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield an epoch's steps, counting what is in them and how long they take."""
        self.samples = self.tokens = 0
        began = time.perf_counter()
        for batches in steps:
            yield batches
            self.samples += sum(map(len, batches))
            self.tokens += sum(map(tokens_in, batches))
            if self.profiler is not None:
                self.profiler.step()
        self.seconds = time.perf_counter() - began

    def measured(self, epoch: Epoch) -> EpochMetrics:
        """Return an epoch with its figures; every rank calls, and the leading one's are whole."""
        (tokens,) = self.strategy.total([self.tokens])
        return EpochMetrics(
            **epoch.model_dump(),
            samples_per_second=self.samples * self.strategy.ranks / self.seconds,
            tokens_per_second=tokens / self.seconds if tokens else None,
            peak_mebibytes=tuple(self.strategy.gather_all(self._peak_mebibytes()) or ()),
        )

    def _peak_mebibytes(self) -> float:
        if on_cuda(self.device):
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return resident_mebibytes("VmHWM") - self.before_mebibytes


@contextmanager
def watching(job: Job, strategy: Strategy) -> Iterator[StepMetrics]:
    """Watch a training for a block; traces and memory snapshots are written at its end."""
    folder, profile = job.profiles or job.folder / "profiles", job.training.profile
    rank = dist.get_rank() if dist.is_initialized() else 0
    trace: AbstractContextManager[Any] = nullcontext()
    if profile.trace:
        trace = tracing(folder / f"trace-rank{rank}.json", profile.traced_steps, job.device)
    memory: AbstractContextManager[Any] = nullcontext()
    if profile.memory:
        memory = recording_memory(folder / f"memory-rank{rank}.pickle")
    with memory, trace as profiler:
        yield StepMetrics(job, strategy, profiler)


@contextmanager
def tracing(file: Path, steps: int, device: str) -> Iterator[Any]:
    """Give a profiler that records a few of the steps it is told of, and writes them to a file."""
    from torch.profiler import ProfilerActivity, profile, schedule

    written: list[Path] = []

    def write(profiler: Any) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.stem}.partial.json")
        profiler.export_chrome_trace(str(partial))
        written.append(partial.replace(file))
        log.info("trace of %d steps: %s", steps, file)

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if on_cuda(device) else []
    plan = schedule(wait=1, warmup=1, active=steps, repeat=1)
    with (
        _quiet_kineto(),
        profile(activities=activities, schedule=plan, on_trace_ready=write) as profiler,
    ):
        yield profiler
    if not written:
        log.warning("profile.trace: there were too few steps to record any")


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep the profiler's library from writing its stages on standard error."""
    name, silent = "KINETO_LOG_LEVEL", "6"
    given = name in os.environ
    os.environ.setdefault(name, silent)
    try:
        yield
    finally:
        if not given:
            del os.environ[name]


@contextmanager
def recording_memory(file: Path) -> Iterator[None]:
    """Record CUDA allocations for a block, and write them to a file, after a failure too."""
    recorder: Any = torch.cuda.memory
    recorder._record_memory_history()
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        recorder._dump_snapshot(str(file))
        recorder._record_memory_history(enabled=None)
        log.info("CUDA allocations: %s", file)


def tokens_in(batch: Batch) -> int:
    """Return the tokens of a batch whose first input is a table of them, else 0."""
    first = batch.inputs[0]
    whole = not (first.is_floating_point() or first.is_complex() or first.dtype == torch.bool)
    return first.numel() if whole and first.dim() == 2 else 0


def on_cuda(device: str) -> bool:
    """Whether a device is a CUDA one."""
    return device.startswith("cuda")


def resident_mebibytes(field: str) -> float:
    """Return this process's resident set: `VmRSS` as it is, `VmHWM` at its largest."""
    # Not getrusage: what that tells of a process begins with its parent's.
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.partition(f"{field}:")[2].split()[0]) / 2**10
