"""Loss, throughput, peak memory, traces and memory snapshots of a training, on every rank."""

from __future__ import annotations

import logging
import math
import os
import time
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from compress.training.checkpoint.metadata import Epoch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from compress.data.batch import Batch
    from compress.training.checkpoint.metadata import LossSum
    from compress.training.distributed.base import Strategy
    from compress.training.loop.job import Job

log = logging.getLogger(__name__)

ENOUGH_VALUES = 2
"""Distinct losses that are remembered: two show that the loss varies."""


class LossMeter:
    """Sum of the losses of an epoch's steps.

    Sums are fractions: without rounding their order does not matter, so that a resumed epoch and
    one on several processes report the same loss to the last bit.
    """

    def __init__(self, before: LossSum) -> None:
        """Start from the sum over all processes that a checkpoint within the epoch recorded."""
        self.before = before
        self.total = Fraction(0)
        self.count = 0
        self.values = set[float]()

    def add(self, loss: float) -> None:
        """Add the loss of a step on this process, unless it is not finite."""
        if math.isfinite(loss):
            self.total += Fraction(loss)
            self.count += 1
            if len(self.values) < ENOUGH_VALUES:
                self.values.add(loss)

    def over_all(self, strategy: Strategy) -> LossSum:
        """Sum over all processes; every process calls this and gets the same."""
        parts = strategy.gather_shares((self.total, self.count, self.values)) or []
        total = sum((part[0] for part in parts), Fraction(self.before[0]))
        count = self.before[1] + sum(part[1] for part in parts)
        values = sorted(set(self.before[2]).union(*(part[2] for part in parts)))
        losses: LossSum = strategy.broadcast((str(total), count, tuple(values[:ENOUGH_VALUES])))
        return losses


def is_constant(losses: LossSum) -> bool:
    """Whether several steps had the same loss to the last bit, or any number of them 0."""
    _, count, values = losses
    return len(values) == 1 and (count > 1 or not values[0])


class EpochMetrics(Epoch):
    """An epoch with throughput and memory, which differ between runs and enter no artifact."""

    samples_per_second: float | None = None
    """Samples of all processes per second of training steps; validation is not counted."""
    tokens_per_second: float | None = None
    """The same in tokens, if the first input is integers `(batch, length)`; padding is counted."""
    peak_mebibytes: tuple[float, ...] = ()
    """Peak memory of each process so far: on its CUDA device, or else the growth of its resident
    set since the training started."""

    def format_throughput(self) -> str:
        """Format the throughput, such as ``1,200 samples/s``."""
        if self.tokens_per_second:
            return f"{self.tokens_per_second:,.0f} tokens/s"
        return f"{self.samples_per_second or 0.0:,.0f} samples/s"

    def format_cost(self) -> str:
        """Format throughput and peak memory."""
        peaks = " ".join(f"{peak:.0f}" for peak in self.peak_mebibytes)
        return f"{self.format_throughput()}, peak MiB by rank: {peaks}"


class StepMetrics:
    """Time, samples, tokens and memory of one rank's epochs."""

    def __init__(self, job: Job, strategy: Strategy, profiler: Any = None) -> None:
        """Record the memory at the start; the profiler's ``step()`` is called after each step."""
        self.device, self.strategy, self.profiler = job.device, strategy, profiler
        self.rss_at_start = 0.0 if is_cuda(job.device) else rss_mebibytes("VmRSS")

    def timed(self, steps: Iterable[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield an epoch's steps, and count their samples, tokens and seconds."""
        self.samples = self.tokens = 0
        started = time.perf_counter()
        for batches in steps:
            yield batches
            self.samples += sum(map(len, batches))
            self.tokens += sum(map(tokens_in, batches))
            if self.profiler is not None:
                self.profiler.step()
        self.seconds = time.perf_counter() - started

    def of_epoch(self, epoch: Epoch) -> EpochMetrics:
        """Add throughput and memory to an epoch; every rank calls this, rank 0 gets all peaks."""
        (tokens,) = self.strategy.sum_over_ranks([self.tokens])
        return EpochMetrics(
            **epoch.model_dump(),
            samples_per_second=self.samples * self.strategy.ranks / self.seconds,
            tokens_per_second=tokens / self.seconds if tokens else None,
            peak_mebibytes=tuple(self.strategy.gather_all(self._peak_mebibytes()) or ()),
        )

    def _peak_mebibytes(self) -> float:
        if is_cuda(self.device):
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        return rss_mebibytes("VmHWM") - self.rss_at_start


@contextmanager
def recording_metrics(job: Job, strategy: Strategy) -> Iterator[StepMetrics]:
    """Record metrics inside the block; traces and memory snapshots are written at its end."""
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
    """Give a torch.profiler that writes a few steps to a file in Chrome's trace format."""
    from torch.profiler import ProfilerActivity, profile, schedule

    written: list[Path] = []  # the profiler calls `write`, and does not say whether it did

    def write(profiler: Any) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.stem}.partial.json")
        profiler.export_chrome_trace(str(partial))
        written.append(partial.replace(file))
        log.info("trace of %d steps: %s", steps, file)

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if is_cuda(device) else []
    steps_to_record = schedule(wait=1, warmup=1, active=steps, repeat=1)
    with (
        _quiet_kineto(),
        profile(activities=activities, schedule=steps_to_record, on_trace_ready=write) as profiler,
    ):
        yield profiler
    if not written:
        log.warning("profile.trace: there were too few steps to record any")


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keep torch.profiler's library Kineto from printing its progress on standard error."""
    name, silent = "KINETO_LOG_LEVEL", "6"
    is_set = name in os.environ
    os.environ.setdefault(name, silent)
    try:
        yield
    finally:
        if not is_set:
            del os.environ[name]


@contextmanager
def recording_memory(file: Path) -> Iterator[None]:
    """Record CUDA allocations inside the block; they are written to a file even if it fails."""
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
    """Count tokens: the entries of a first input that is integers `(batch, length)`, else 0."""
    tokens = batch.inputs[0]
    integers = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    return tokens.numel() if integers and tokens.dim() == 2 else 0


def is_cuda(device: str) -> bool:
    """Whether a device is a CUDA one."""
    return device.startswith("cuda")


def rss_mebibytes(field: str) -> float:
    """Read this process's resident set size in MiB: `VmRSS` now, `VmHWM` at its peak."""
    # Not getrusage: after a fork its ru_maxrss starts at the parent's peak.
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.partition(f"{field}:")[2].split()[0]) / 2**10
