"""Loss, throughput, peak memory, traces and memory snapshots of a training, on every rank."""

from __future__ import annotations

import logging
import math
import os
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from compress.common.config import Settings
from compress.common.sealed_json import write_sealed
from compress.graph.flops import count_macs
from compress.profiling.operator_table import OPERATORS_FILE, OperatorTable
from compress.training.checkpoint import Epoch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from compress.artifacts.eager_model import EagerModel
    from compress.data.batch import Batch
    from compress.training.checkpoint import LossSum
    from compress.training.config.training import Trace
    from compress.training.distributed.base import Strategy
    from compress.training.loop.train_state import Job

log = logging.getLogger(__name__)

ENOUGH_VALUES = 2
"""Distinct losses that are remembered: two show that the loss varies."""


class LossMeter:
    """Sum of the losses of an epoch's steps."""

    def __init__(self, before: LossSum) -> None:
        """Start from the sum over all processes that a checkpoint within the epoch recorded."""
        self.before = before
        # A fraction: without rounding the order of the sum does not matter, so that a resumed
        # epoch and one on several processes report the same loss to the last bit.
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
        parts = strategy.all_gather_shares((self.total, self.count, self.values))
        total = sum((part[0] for part in parts), Fraction(self.before[0]))
        count = self.before[1] + sum(part[1] for part in parts)
        values = sorted(set(self.before[2]).union(*(part[2] for part in parts)))
        return str(total), count, tuple(values[:ENOUGH_VALUES])


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


class StepRecord(Settings):
    """One optimizer step, over all processes, and the throughput since the record before it."""

    step: int
    """Counted from 1 over the whole training."""
    epoch: int
    loss: float | None
    """Mean over the processes' samples; None if it is not finite."""
    learning_rate: float
    gradient_norm: float | None = None
    """Global norm before clipping; None if it is not finite, or DeepSpeed's."""
    samples_per_second: float
    """Samples of all processes; checkpoints between the two steps take part of the time."""
    tokens_per_second: float | None = None
    mfu: float | None = None
    """Model FLOPs utilization, from 0 to 1: operations of forward and backward pass, without any
    recomputation, over what the devices could do in that time (Chowdhery et al., "PaLM", 2022)."""

    def format_throughput(self) -> str:
        """Format throughput and MFU, such as ``1,200 tokens/s, MFU 31 %``."""
        rate = f"{self.samples_per_second:,.0f} samples/s"
        if self.tokens_per_second:
            rate = f"{self.tokens_per_second:,.0f} tokens/s"
        return rate if self.mfu is None else f"{rate}, MFU {100 * self.mfu:.3g} %"


TrainingRecord: TypeAlias = StepRecord | EpochMetrics
RECORDS: TypeAdapter[TrainingRecord] = TypeAdapter(TrainingRecord)
"""Reads a record from JSON."""

PEAK_FLOPS = {
    "A100": 312e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}
"""Dense FLOP/s in bf16 and fp16 by a part of the device's name, from NVIDIA's data sheets; the
first that matches counts."""


class StepMetrics:
    """Time, samples, tokens and memory of one rank's epochs."""

    def __init__(self, job: Job, strategy: Strategy, profiler: Any = None) -> None:
        """Record the memory at the start; the profiler's ``step()`` is called after each step."""
        self.job, self.device, self.strategy, self.profiler = job, job.device, strategy, profiler
        self.rss_at_start = 0.0 if job.device.startswith("cuda") else rss_mebibytes("VmRSS")

    def timed(self, steps: Iterable[list[Batch]]) -> Iterator[list[Batch]]:
        """Yield an epoch's steps, and count their samples, tokens and seconds."""
        self.samples = self.tokens = 0
        started = time.perf_counter()
        self.recorded = started, 0, 0
        for batches in steps:
            self.samples += sum(map(len, batches))
            self.tokens += sum(map(tokens_in, batches))
            yield batches
            if self.profiler is not None:
                self.profiler.step()
        self.seconds = time.perf_counter() - started

    def of_step(
        self, epoch: int, step: int, loss: float, rate: float, gradient_norm: torch.Tensor | None
    ) -> StepRecord:
        """Record a step, counted from 1; every rank calls this, as the loss is that of all."""
        now, (began, samples, tokens) = time.perf_counter(), self.recorded
        self.recorded = now, self.samples, self.tokens
        ranks, seconds = self.strategy.ranks, now - began
        losses, all_tokens = self.strategy.sum_over_ranks([loss, self.tokens - tokens])
        samples_per_second = (self.samples - samples) * ranks / seconds
        tokens_per_second = all_tokens / seconds if all_tokens else None
        mfu = None
        if self.job.flops_per_unit and (peak := peak_flops(self.job)):
            units_per_second = tokens_per_second or samples_per_second
            mfu = self.job.flops_per_unit * units_per_second / peak
        norm = math.nan if gradient_norm is None else float(gradient_norm)
        return StepRecord(
            step=step,
            epoch=epoch,
            loss=losses / ranks if math.isfinite(losses) else None,
            learning_rate=rate,
            gradient_norm=norm if math.isfinite(norm) else None,
            samples_per_second=samples_per_second,
            tokens_per_second=tokens_per_second,
            mfu=mfu,
        )

    def of_epoch(self, epoch: Epoch) -> EpochMetrics:
        """Add throughput and memory to an epoch; every rank calls this, rank 0 gets all peaks."""
        (tokens,) = self.strategy.sum_over_ranks([self.tokens])
        if self.device.startswith("cuda"):
            peak = torch.cuda.max_memory_allocated(self.device) / 2**20
        else:
            peak = rss_mebibytes("VmHWM") - self.rss_at_start
        return EpochMetrics(
            **epoch.model_dump(),
            samples_per_second=self.samples * self.strategy.ranks / self.seconds,
            tokens_per_second=tokens / self.seconds if tokens else None,
            peak_mebibytes=tuple(self.strategy.gather_all(peak) or ()),
        )


@contextmanager
def recording_metrics(job: Job, strategy: Strategy) -> Iterator[StepMetrics]:
    """Record metrics inside the block; traces and memory snapshots are written at its end."""
    folder, profile = job.profiles or job.folder / "profiles", job.training.profile
    rank = dist.get_rank() if dist.is_initialized() else 0
    trace: AbstractContextManager[Any] = nullcontext()
    if profile.trace_settings:
        file = folder / f"trace-rank{rank}.json"
        trace = tracing(file, profile.trace_settings, job.device, lists_operators=rank == 0)
    memory: AbstractContextManager[Any] = nullcontext()
    if profile.memory:
        memory = recording_memory(folder / f"memory-rank{rank}.pickle")
    with memory, trace as profiler:
        yield StepMetrics(job, strategy, profiler)


@contextmanager
def tracing(file: Path, settings: Trace, device: str, *, lists_operators: bool) -> Iterator[Any]:
    """Give a torch.profiler that writes a few steps to a file in Chrome's trace format.

    With ``lists_operators`` it also writes the table of the most expensive ones, beside that file.
    """
    from torch.profiler import ProfilerActivity, profile, schedule

    written: list[Path] = []  # the profiler calls `write`, and does not say whether it did
    on_cuda = device.startswith("cuda")

    def write(profiler: Any) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".{file.stem}.partial.json")
        profiler.export_chrome_trace(str(partial))
        written.append(partial.replace(file))
        log.info("trace of %d steps: %s", settings.active, file)
        if lists_operators:
            table = OperatorTable.from_profiler(
                profiler,
                file.parent.name,
                settings.active,
                on_cuda=on_cuda,
                shapes=settings.shapes,
                memory=settings.memory,
            )
            write_sealed(file.with_name(OPERATORS_FILE), table)

    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if on_cuda else []
    plan = schedule(wait=settings.wait, warmup=settings.warmup, active=settings.active, repeat=1)
    # Kineto, torch.profiler's library, prints its progress on standard error by default.
    is_set = "KINETO_LOG_LEVEL" in os.environ
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        with profile(
            activities=activities,
            schedule=plan,
            on_trace_ready=write,
            record_shapes=settings.shapes,
            profile_memory=settings.memory,
            with_stack=settings.stack,
            # Of the only cycle. Without it torch 2.11 warns at the start that events are cleared.
            acc_events=True,
        ) as profiler:
            yield profiler
    finally:
        if not is_set:
            del os.environ["KINETO_LOG_LEVEL"]
    if not written:
        log.warning("profile.trace: there were too few steps to record any")


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


def flops_per_unit(start: EagerModel, job: Job) -> float | None:
    """Count the FLOPs to train on a token, or on a sample of a model without; None if not needed.

    Three times those of a forward pass, of two for each multiply-accumulate: the backward pass
    computes the gradients of inputs and of weights.
    """
    profile = job.training.profile
    if not profile.log_every or not (profile.peak_flops or job.device.startswith("cuda")):
        return None
    example = replace(job, device="cpu").example_batch()
    macs = count_macs(start.load(), example.inputs) * len(example)
    return 6 * macs / (tokens_in(example) or len(example))


def peak_flops(job: Job) -> float | None:
    """Return the FLOP/s that all devices of a training could do; None if they are not known."""
    training = job.training
    peak = training.profile.peak_flops
    if peak is None and job.device.startswith("cuda") and training.precision != "fp32":
        name = torch.cuda.get_device_name(job.device)
        peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    return peak and peak * training.parallel.ranks


def tokens_in(batch: Batch) -> int:
    """Count tokens: the entries of a first input that is integers `(batch, length)`, else 0."""
    tokens = batch.inputs[0]
    integers = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    return tokens.numel() if integers and tokens.dim() == 2 else 0


def rss_mebibytes(field: str) -> float:
    """Read this process's resident set size in MiB: `VmRSS` now, `VmHWM` at its peak."""
    # Not getrusage: after a fork its ru_maxrss starts at the parent's peak.
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.partition(f"{field}:")[2].split()[0]) / 2**10
