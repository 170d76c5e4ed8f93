"""`fit`: train a model with given settings, and resume where an interrupted run stopped."""

from __future__ import annotations

import hashlib
import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from compress.common.errors import CompressError, StageFailed, Unavailable
from compress.common.process import threads_to_use
from compress.common.strict_json import canonical_json
from compress.training.checkpoint.metadata import (
    FOLDER,
    TrainProgress,
    newest_intact,
    read_progress,
    require_intact,
)
from compress.training.distributed.base import SingleProcess
from compress.training.launch.launcher import train_on_ranks
from compress.training.launch.rank_group import need_group
from compress.training.launch.worker_errors import one_line
from compress.training.loop.early_stopping import is_finished
from compress.training.loop.job import Job
from compress.training.loop.loggers import epoch_values, log_epochs, require_tracker
from compress.training.loop.trainer import train
from compress.training.optim.compile import require_compiler
from compress.training.result import Fit, read_result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.data.splits import Splits
    from compress.training.config.training import Training
    from compress.training.loop.step_metrics import EpochMetrics
    from compress.training.objectives.objective import Objective
    from compress.training.objectives.weight_constraint import Constraint

DP_WARNING = (
    "DataParallel's threads share one interpreter and copy the model in each step; "
    "strategy: ddp with processes: n is faster, and gives the same weights"
)

log = logging.getLogger(__name__)


def fit(
    start: EagerModel,
    training: Training,
    objective: Objective,
    context: Context,
    task: str,
    *,
    accept_start: bool = False,
    constraint: Constraint | None = None,
) -> Fit:
    """Train a model's weights; an interrupted training resumes from its last checkpoint.

    Checkpoints lie under ``context.work``, which the caller removes when the stage is done.

    Args:
        start: the model; it is not changed.
        training: the hyper-parameters.
        objective: the loss.
        context: data, metric, device and seed.
        task: name under which progress and messages appear.
        accept_start: return the input model's weights if no epoch is better by the metric.
        constraint: what the weights must satisfy after every step.

    Raises:
        StageFailed: a process failed or the loss is not finite; the message names the root cause.
    """
    training = training.hyper_parameters()
    data = context.need_data(task)
    _check(training, data, context.device, task)
    require_tracker(training.profile)
    results = (context.results or context.root.parent).absolute()
    with _one_line_errors(task):
        require_compiler(training, context.device)
        job = _create_job(start, training, objective, context, data, accept_start, constraint)
        job, earlier = _find_checkpoint(replace(job, profiles=results / "profiles" / task), task)
        done = earlier.trained_epochs
        context.progress(task, done, training.epochs, _resumed_after(earlier))
        if not is_finished(training, earlier.history, job.metric):
            identity, metric = job.folder.name.removeprefix("fit-"), context.metric.name
            profile = training.profile
            with log_epochs(profile, results, task, identity, done, metric) as log_epoch:
                _run(job, _epoch_callback(job, context, task, log_epoch))
        result = read_result(start, job)
    log.info("%s: %d epochs, kept epoch %d", task, len(result.history), result.kept.epoch)
    if result.warning:
        log.warning("%s: %s", task, result.warning)
    return result


def _check(training: Training, data: Splits, device: str, task: str) -> None:
    """Refuse what cannot be trained, before any process is started.

    Raises:
        StageFailed: the data or the device does not fit the settings.
        Unavailable: a package is missing.
    """
    need_group(training.parallel)
    for requirement in training.parallel.requirements:
        if requirement.missing():
            raise Unavailable(f"{task}: needs {requirement.what}; {requirement.install}")
    samples, processes = len(data.split("train")), training.parallel.replicas  # type: ignore[arg-type]  # Splits admits sized datasets only
    if samples < processes:
        raise StageFailed(
            f"{task}: split 'train' has {samples} samples for {processes} processes; "
            "lower parallel.processes or parallel.nodes, or bring more data"
        )
    if training.parallel.pipeline and samples < training.batch_size:
        raise StageFailed(
            f"{task}: split 'train' has {samples} samples and a pipeline needs whole batches of "
            f"{training.batch_size}; lower batch_size"
        )
    if training.needs_val and "val" not in data.datasets:
        raise StageFailed(
            f"{task}: {training.needs_val} needs a split 'val'; add one"
            f"{' or set keep: last' if training.keep == 'best' else ' or change the setting'}"
        )
    if training.precision == "fp16" and not device.startswith("cuda"):
        raise StageFailed(
            f"{task}: precision: fp16 needs a CUDA device and this is {device}; use bf16 or fp32"
        )
    if training.profile.memory and not device.startswith("cuda"):
        raise StageFailed(
            f"{task}: profile.memory records a CUDA device's memory and this is {device}; leave it "
            "out (the peak of each process is reported without it)"
        )
    if training.parallel.strategy == "dp":
        log.warning("%s: strategy dp runs as one process: %s", task, DP_WARNING)


def _create_job(
    start: EagerModel,
    training: Training,
    objective: Objective,
    context: Context,
    data: Splits,
    accept_start: bool,
    constraint: Constraint | None,
) -> Job:
    """Describe the training; its folder is named by the hash of all that decides its result."""
    reference = context.artifact("source") if context.metric.name == "fidelity" else None
    identity = {
        # Without `parallel`: a training resumes with another strategy or number of processes.
        "training": training.model_dump(mode="json", exclude={"parallel"}),
        "objective": repr(objective),
        "loss": context.loss.identity(),
        "start": start.digest,
        "data": data.fingerprint(),
        "metric": context.metric.identity(),
        "reference": reference.digest if reference else None,
        "seed": context.seed,
        "accept_start": accept_start,
        "constraint": repr(constraint) if constraint else None,
    }
    digest = hashlib.sha256(canonical_json(identity).encode()).hexdigest()
    folder = context.work / f"fit-{digest[:32]}"
    folder.mkdir(exist_ok=True)
    return Job(
        start=start.path.absolute(),
        training=training,
        objective=objective,
        data=data,
        metric=context.metric.with_inferred_loss(data),
        reference=reference.path.absolute() if reference else None,
        device=context.device,
        threads=max(1, threads_to_use() // training.parallel.ranks_per_node),
        seed=context.seed,
        folder=folder.absolute(),
        accept_start=accept_start,
        constraint=constraint,
    )


def _find_checkpoint(job: Job, task: str) -> tuple[Job, TrainProgress]:
    """Return the job with its newest intact checkpoint, and the progress recorded in it."""
    checkpoint = newest_intact(job.folder)
    if checkpoint is None:
        return job, TrainProgress()
    earlier, layout = read_progress(checkpoint), job.training.parallel.layout
    if earlier.kept_in:
        require_intact(job.folder / FOLDER / earlier.kept_in)
    log.info("%s: resumed after epoch %d and %d steps", task, earlier.trained_epochs, earlier.steps)
    if earlier.layouts[-1] != layout:
        log.warning(
            "%s: resumed with %s from a checkpoint of %s; the result may differ by rounding "
            "from that of an uninterrupted training",
            task,
            layout,
            earlier.layouts[-1],
        )
    return replace(job, trusted=checkpoint.name), earlier


def _resumed_after(earlier: TrainProgress) -> str:
    """Describe the checkpoint that training resumes from; empty for a new training."""
    after = [f"epoch {earlier.trained_epochs}"] if earlier.trained_epochs else []
    after += [f"{earlier.steps} steps"] if earlier.steps else []
    return f"resumed after {' and '.join(after)}" if after else ""


def _epoch_callback(
    job: Job, context: Context, task: str, log_epoch: Callable[[EpochMetrics], None]
) -> Callable[[EpochMetrics], None]:
    """Return a function that reports an epoch to the log, the tracker and the progress bar."""
    total = job.training.epochs

    def on_epoch(epoch: EpochMetrics) -> None:
        value = "" if epoch.metric is None else f" val {job.metric.name} {epoch.metric:.4g}"
        note = f"epoch {epoch.epoch}/{total} loss {epoch.loss:.3g}{value}"
        figures = epoch_values(epoch, job.metric.name)
        fields = {"event": "epoch", "task": task, "epoch": epoch.epoch, "figures": figures}
        log.info("%s: %s, %s", task, note, epoch.format_cost(), extra={"log_fields": fields})
        log_epoch(epoch)
        context.progress(task, epoch.epoch, total, f"{note} ({epoch.format_throughput()})")

    return on_epoch


def _run(job: Job, on_epoch: Callable[[EpochMetrics], None]) -> None:
    """Train in this process or in several."""
    if job.training.parallel.in_process:
        train(job, SingleProcess(), on_epoch)
    else:
        train_on_ranks(job, on_epoch)


@contextmanager
def _one_line_errors(task: str) -> Iterator[None]:
    """Convert any exception into one of ours whose message is one line: task and root cause."""
    try:
        yield
    except CompressError as error:
        raise type(error)(f"{task}: {error}") from error
    except Exception as error:
        raise StageFailed(f"{task}: {one_line(error)}") from error
