"""fit: trained weights for a model, wherever and however often the training was interrupted."""

from __future__ import annotations

import hashlib
import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from compress.artifacts.artifact import canonical_json
from compress.common.errors import CompressError, StageFailed, Unavailable
from compress.common.process import threads_to_use
from compress.training.checkpoint.metadata import (
    FOLDER,
    Progress,
    need_whole,
    newest,
    read_progress,
)
from compress.training.distributed.ddp import SingleProcess
from compress.training.launch.launcher import train_on_ranks
from compress.training.launch.worker_errors import one_line
from compress.training.loop.early_stopping import is_over
from compress.training.loop.loggers import figures_of, refuse_missing, tracking
from compress.training.loop.trainer import Job, train
from compress.training.optim.compile import need_compiler
from compress.training.result import Fit, outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from compress.artifacts.eager_model import EagerModel
    from compress.core.stage import Context
    from compress.data.splits import Splits
    from compress.training.config.training import Training
    from compress.training.loop.step_metrics import EpochMetrics
    from compress.training.objectives.objective import Objective
    from compress.training.objectives.weight_constraint import Constraint

AGAINST_DP = (
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
    """Train a model's weights; a training that was interrupted goes on where it was.

    The state after each epoch lies under ``context.work``, which the caller clears in the end.

    Args:
        start: the model; it is not changed.
        training: the hyper-parameters.
        objective: the loss.
        context: data, metric, device and seed.
        task: what the progress is shown as.
        accept_start: keep the model as it came in unless an epoch is better by the metric.
        constraint: what the weights must satisfy in every step.

    Raises:
        StageFailed: a process failed or the loss is not finite; the message tells the root cause.
    """
    training = training.hyper_parameters()
    data = context.need_data(task)
    _check(training, data, context.device, task)
    refuse_missing(training.profile)
    with _one_line_errors(task):
        need_compiler(training, context.device)
        job = _job(start, training, objective, context, data, accept_start, constraint)
        job = replace(job, profiles=_results(context) / "profiles" / task)
        job, earlier = _resumed(job, task)
        done = earlier.trained_epochs
        context.progress(task, done, training.epochs, _place(earlier))
        if not is_over(training, earlier.history, job.metric):
            name = context.metric.name
            with tracking(
                training.profile, _results(context), task, _digest(job), done, name
            ) as track:
                _run(job, _epoch_logger(job, context, task, track))
        result = outcome(start, job)
    log.info("%s: %d epochs, kept epoch %d", task, len(result.history), result.kept.epoch)
    if result.warning:
        log.warning("%s: %s", task, result.warning)
    return result


def _check(training: Training, data: Splits, device: str, task: str) -> None:
    """Refuse what cannot be trained, before any process is started."""
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
            "out (the peak of each process is told without it)"
        )
    if training.parallel.strategy == "dp":
        log.warning("%s: strategy dp runs as one process: %s", task, AGAINST_DP)


def _job(
    start: EagerModel,
    training: Training,
    objective: Objective,
    context: Context,
    data: Splits,
    accept_start: bool,
    constraint: Constraint | None,
) -> Job:
    """Return the training as one value, its folder named after all that decides its result."""
    reference = context.artifact("source") if context.metric.name == "fidelity" else None
    identity = {
        # However it is spread, it is the same training, and goes on as such.
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
        metric=context.metric.settled(data),
        reference=reference.path.absolute() if reference else None,
        device=context.device,
        threads=max(1, threads_to_use() // training.parallel.ranks_per_node),
        seed=context.seed,
        folder=folder.absolute(),
        accept_start=accept_start,
        constraint=constraint,
    )


def _resumed(job: Job, task: str) -> tuple[Job, Progress]:
    """Return the job and how far an earlier, interrupted run of it came."""
    found = newest(job.folder)
    if found is None:
        return job, Progress()
    earlier, layout = read_progress(found), job.training.parallel.layout
    if earlier.kept_in:
        need_whole(job.folder / FOLDER / earlier.kept_in)
    log.info("%s: resumed after epoch %d and %d steps", task, earlier.trained_epochs, earlier.steps)
    if earlier.layouts[-1] != layout:
        log.warning(
            "%s: resumed with %s from a checkpoint of %s; the result may differ by rounding "
            "from that of an uninterrupted training",
            task,
            layout,
            earlier.layouts[-1],
        )
    return replace(job, trusted=found.name), earlier


def _place(earlier: Progress) -> str:
    """Return where a training goes on, in words."""
    after = [f"epoch {earlier.trained_epochs}"] if earlier.trained_epochs else []
    after += [f"{earlier.steps} steps"] if earlier.steps else []
    return f"resumed after {' and '.join(after)}" if after else ""


def _results(context: Context) -> Path:
    """Return the absolute folder of what a run tells beside its artifacts."""
    return (context.results or context.root.parent).absolute()


def _digest(job: Job) -> str:
    """Return what tells a training from all others."""
    return job.folder.name.removeprefix("fit-")


def _epoch_logger(
    job: Job, context: Context, task: str, track: Callable[[EpochMetrics], None]
) -> Callable[[EpochMetrics], None]:
    """Return what passes epochs on as progress, and to the log and the tracker."""
    total = job.training.epochs

    def tell(epoch: EpochMetrics) -> None:
        value = "" if epoch.metric is None else f" val {job.metric.name} {epoch.metric:.4g}"
        note = f"epoch {epoch.epoch}/{total} loss {epoch.loss:.3g}{value}"
        figures = figures_of(epoch, job.metric.name)
        told = {"event": "epoch", "task": task, "epoch": epoch.epoch, "figures": figures}
        log.info("%s: %s, %s", task, note, epoch.cost(), extra={"log_fields": told})
        track(epoch)
        context.progress(task, epoch.epoch, total, f"{note} ({epoch.speed()})")

    return tell


def _run(job: Job, tell: Callable[[EpochMetrics], None]) -> None:
    """Train in this process or in several."""
    parallel = job.training.parallel
    if parallel.alone:
        train(job, SingleProcess(), tell)
    else:
        train_on_ranks(job, tell)


@contextmanager
def _one_line_errors(task: str) -> Iterator[None]:
    """Turn whatever is raised into one error that names the task and the root cause."""
    try:
        yield
    except CompressError as error:
        raise type(error)(f"{task}: {error}") from error
    except Exception as error:
        raise StageFailed(f"{task}: {one_line(error)}") from error
