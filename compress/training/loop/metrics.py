"""Loss, throughput, memory and traces of a training; TensorBoard, MLflow and user callbacks."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from compress.common.config import Settings
from compress.common.dependency_recorder import recording_paused
from compress.common.errors import StageFailed, exits_refused, first_line, located, raised_as
from compress.common.factories import resolve
from compress.common.process import random_state_kept
from compress.common.sealed_json import write_sealed
from compress.graph.flops import count_macs
from compress.profiling.operator_table import OPERATORS_FILE, OperatorTable
from compress.profiling.rss import memory_kib
from compress.training.checkpoint import Epoch, LossSum
from compress.training.config.training import Callbacks, Profile, Trace

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from compress.data.batch import Batch
    from compress.training.distributed.base import Strategy
    from compress.training.loop.train_state import Job

log = logging.getLogger(__name__)

ENOUGH_VALUES = 2  # distinct losses that are remembered: two show that the loss varies


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
        own = self.total, self.count, self.values
        parts = strategy.broadcast(strategy.gather_shares(own))
        total = sum((part[0] for part in parts), Fraction(self.before[0]))
        count = self.before[1] + sum(part[1] for part in parts)
        values = sorted(set(self.before[2]).union(*(part[2] for part in parts)))
        return str(total), count, tuple(values[:ENOUGH_VALUES])


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
OnRecord: TypeAlias = Callable[[TrainingRecord], None]
RECORDS: TypeAdapter[TrainingRecord] = TypeAdapter(TrainingRecord)  # reads a record from JSON

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
        self.kib_at_start = 0 if job.device.startswith("cuda") else memory_kib("VmRSS")

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
            # Not getrusage: after a fork its ru_maxrss starts at the parent's peak.
            peak = (memory_kib("VmHWM") - self.kib_at_start) / 2**10
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
    with ExitStack() as stack:
        profiler = None
        if profile.memory:
            stack.enter_context(recording_memory(folder / f"memory-rank{rank}.pickle"))
        if settings := profile.trace_settings:
            trace = folder / f"trace-rank{rank}.json"
            traced = tracing(trace, settings, job.device, lists_operators=rank == 0)
            profiler = stack.enter_context(traced)
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


EXPERIMENT = "compress"
FOLDER = "tracking"
STEP = "step/"  # before the names of values that are logged by step and not by epoch
IDENTITY_TAG = "compress.training"  # tag of an MLflow run by which a resumed training finds its run
PARAMS_PER_BATCH = 100  # MLflow refuses more parameters in one request
LONGEST_PARAM = 500
NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w/. :-]")
MLFLOW_STATUS = {"passed": "FINISHED", "interrupted": "KILLED"}
"""MLflow's words for how a run ended; all others are FAILED."""


class TensorBoardLogger:
    """Scalars in an event file."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Open a folder; values that an interrupted run wrote from this step on are voided."""
        from torch.utils import tensorboard

        writer: Any = tensorboard.SummaryWriter
        self.folder = folder
        self.writer = writer(str(folder), purge_step=first_step)

    def by_step(self, first_step: int) -> TensorBoardLogger:
        """Open a logger for training steps: in a folder below, as voiding is by number alone."""
        return TensorBoardLogger(self.folder / "steps", first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append to the event file, visible at once."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def write_settings(self, settings: Mapping[str, str]) -> None:
        """Write a table as text."""
        rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
        self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")

    def finish(self, status: str, report: Path) -> None:
        """Write how the run ended, and copy its report, if there is one, beside the event file."""
        self.writer.add_text("status", status)
        self.close()
        if report.exists():
            shutil.copyfile(report, self.folder / report.name)

    def close(self) -> None:
        """Close the event file."""
        self.writer.close()


class MLflowLogger:
    """Metrics and parameters of an MLflow run; a resumed training appends to its earlier run."""

    def __init__(
        self, uri: str, folder: Path | None, identity: str, name: str, first_step: int
    ) -> None:
        """Open a run; where ``first_step`` is above 1, one of the same identity is resumed."""
        from mlflow import MlflowClient

        # MLflow retries for minutes by default where nobody answers.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self.client: Any = MlflowClient(tracking_uri=uri)
        known = self.client.get_experiment_by_name(EXPERIMENT)
        if known:
            experiment = known.experiment_id
        else:
            # A local database keeps no artifacts: they would go to the working directory. A server,
            # for which there is no folder, does.
            artifacts = (folder / "artifacts").absolute().as_uri() if folder else None
            experiment = self.client.create_experiment(EXPERIMENT, artifact_location=artifacts)
        earlier = self.client.search_runs([experiment], f"tags.`{IDENTITY_TAG}` = '{identity}'")
        if first_step > 1 and earlier:
            self.run = earlier[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
        else:
            tags = {IDENTITY_TAG: identity}
            self.run = self.client.create_run(experiment, run_name=name, tags=tags).info.run_id
        self.written: dict[str, set[int]] = {}

    def by_step(self, first_step: int) -> MLflowLogger:
        """Return the logger for training steps: this one, as each name has steps of its own."""
        return self

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values in one request, except those that the resumed run has of that step."""
        from mlflow.entities import Metric

        now, metrics = int(time.time() * 1000), []
        for name, value in ((mlflow_name(name), value) for name, value in values.items()):
            if name not in self.written:
                history = self.client.get_metric_history(self.run, name)
                self.written[name] = {metric.step for metric in history}
            if step not in self.written[name]:
                metrics.append(Metric(name, value, now, step))
        if metrics:
            self.client.log_batch(self.run, metrics=metrics)

    def write_settings(self, settings: Mapping[str, str]) -> None:
        """Send the settings as parameters."""
        from mlflow.entities import Param

        params = [Param(mlflow_name(n), value[:LONGEST_PARAM]) for n, value in settings.items()]
        for start in range(0, len(params), PARAMS_PER_BATCH):
            self.client.log_batch(self.run, params=params[start : start + PARAMS_PER_BATCH])

    def finish(self, status: str, report: Path) -> None:
        """Send the report as an artifact, and end the run."""
        if report.exists():
            self.client.log_artifact(self.run, str(report))
        self.client.set_terminated(self.run, status=MLFLOW_STATUS.get(status, "FAILED"))

    def close(self) -> None:
        """End the run as finished."""
        self.client.set_terminated(self.run)


ExperimentLogger: TypeAlias = TensorBoardLogger | MLflowLogger


def open_logger(
    kind: str, uri: str | None, results: Path, name: str, identity: str, first_step: int
) -> ExperimentLogger:
    """Open the logger of a kind, `tensorboard` or `mlflow`, for one of several runs of a name.

    ``uri`` is the address of an MLflow server, or a folder relative to that of the results,
    `tracking` if None. Steps from ``first_step`` on, which an interrupted run wrote, are replaced.
    """
    is_address = "://" in (uri or "")
    folder = results if is_address else results / (uri or FOLDER)
    if kind == "tensorboard":
        return TensorBoardLogger(folder / name, first_step)
    if uri is not None and is_address:
        return MLflowLogger(uri, None, identity, name, first_step)
    folder.mkdir(parents=True, exist_ok=True)
    # A database, because MLflow 3 no longer writes plain folders.
    database = f"sqlite:///{folder.absolute() / 'mlflow.db'}"
    return MLflowLogger(database, folder, identity, name, first_step)


def mlflow_name(name: str) -> str:
    """Replace characters that MLflow refuses in names, such as the equal sign of a branch's."""
    return NOT_IN_MLFLOW_NAMES.sub(":", name)


def epoch_values(epoch: EpochMetrics, metric: str) -> dict[str, float]:
    """Return an epoch's known values by the names under which they are logged."""
    logged = {"loss", "learning_rate", "samples_per_second", "tokens_per_second"}
    values: dict[str, float] = epoch.model_dump(include=logged, exclude_none=True)
    values |= {} if epoch.metric is None else {f"val/{metric}": epoch.metric}
    return values | {f"peak_mebibytes/rank{r}": p for r, p in enumerate(epoch.peak_mebibytes)}


def step_values(record: StepRecord) -> dict[str, float]:
    """Return a step's known values by the names under which they are logged."""
    values = record.model_dump(exclude={"step", "epoch"}, exclude_none=True)
    return {f"{STEP}{name}": value for name, value in values.items()}


@contextmanager
def log_records(
    job: Job, results: Path, task: str, trained_epochs: int, trained_steps: int
) -> Iterator[OnRecord]:
    """Give a function that logs steps and epochs; a logger that fails is dropped with a warning."""
    profile, identity = job.training.profile, job.folder.name.removeprefix("fit-")
    logger: ExperimentLogger | None = None
    step_logger: ExperimentLogger | None = None
    last_epoch, last_step = trained_epochs, trained_steps  # an interrupted run has logged these

    def write(record: TrainingRecord) -> None:
        nonlocal logger, step_logger, last_epoch, last_step
        if logger is None:
            return
        try:
            if isinstance(record, StepRecord):
                step_logger = step_logger or logger.by_step(trained_steps + 1)
                if record.step > last_step:
                    step_logger.write(record.step, step_values(record))
                last_step = max(last_step, record.step)
            elif record.epoch > last_epoch:
                logger.write(record.epoch, epoch_values(record, job.metric.name))
                last_epoch = record.epoch
        except Exception as error:  # noqa: BLE001 - a server that is gone must not end a training
            _warn(profile, error)
            logger = None

    if profile.tracker != "none":
        try:
            name = f"{task}-{identity[:8]}"
            uri = profile.tracking_uri
            logger = open_logger(profile.tracker, uri, results, name, identity, trained_epochs + 1)
        except Exception as error:  # noqa: BLE001 - neither must one that cannot be opened
            _warn(profile, error)
    try:
        yield write
    finally:
        for opened in dict.fromkeys((logger, step_logger)):
            if opened is not None:
                opened.close()


def _warn(profile: Profile, error: Exception) -> None:
    log.warning(
        "tracker %s failed (%s: %s); the training goes on without it",
        profile.tracker,
        type(error).__name__,
        first_line(error),
    )


EVENTS = ("on_step_end", "on_epoch_end")


class CallbackRunner:
    """Calls the user's functions once for each step and epoch, in order."""

    def __init__(self, functions: dict[str, Callable[[dict[str, Any]], object]]) -> None:
        self.functions = functions
        self.last = dict.fromkeys(EVENTS, 0)

    @classmethod
    def from_settings(cls, settings: Callbacks | str, folder: Path | None) -> Self:
        """Import the functions, or create an object of the class, from the folder of user code."""
        # Not recorded: what they read changes no artifact.
        with recording_paused(environment=True):
            if isinstance(settings, Callbacks):
                named = {event: getattr(settings, event) for event in EVENTS}
                return cls({event: resolve(n, folder) for event, n in named.items() if n})
            with raised_as(StageFailed, f"callbacks: {settings} raised"), exits_refused():
                created = resolve(settings, folder)()
        functions = {event: getattr(created, event, None) for event in EVENTS}
        if not any(functions.values()):
            raise StageFailed(f"callbacks: {settings} has no method {' or '.join(EVENTS)}; add one")
        return cls({event: function for event, function in functions.items() if function})

    @property
    def wants_steps(self) -> bool:
        """Whether a function is called after each step."""
        return "on_step_end" in self.functions

    def __call__(self, record: TrainingRecord) -> None:
        """Call the function for a step or an epoch; one that is trained again is left out."""
        event, number = "on_epoch_end", record.epoch
        if isinstance(record, StepRecord):
            event, number = "on_step_end", record.step
        # After a process was killed, steps since the last checkpoint are trained again.
        if event not in self.functions or number <= self.last[event]:
            return
        self.last[event] = number
        after = f" (after {'epoch' if event == 'on_epoch_end' else 'step'} {number})"
        with (
            located(f"callbacks.{event}: ", StageFailed),
            raised_as(StageFailed, "it raised", after),
            exits_refused(),
            recording_paused(environment=True),
            random_state_kept("cpu"),
        ):
            self.functions[event](record.model_dump())
