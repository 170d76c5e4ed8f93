"""fit: trained weights for a model, wherever and however often the training was interrupted."""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.core.artifact import canonical_json
from compress.core.errors import CompressError, StageFailed
from compress.training.failure import one_line
from compress.training.launch import train_on_ranks
from compress.training.loop import Job, train
from compress.training.parallel import Alone
from compress.training.progress import is_over
from compress.training.resume import Epoch, read_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pydantic import JsonValue
    from torch import nn

    from compress.core.data import Splits
    from compress.core.eager import EagerModel
    from compress.core.stage import Context
    from compress.training.objective import Objective
    from compress.training.settings import Training

AGAINST_DP = (
    "DataParallel's threads share one interpreter and copy the model in each step; "
    "strategy: ddp with processes: n is faster, and gives the same weights"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fit:
    """What a training came to."""

    module: nn.Module
    """The kept weights in a fresh module, in eval mode, on the CPU."""
    history: tuple[Epoch, ...]
    kept: Epoch
    """The epoch whose weights were kept; 0 is the model as it came in."""

    def facts(self) -> dict[str, JsonValue]:
        """Return what an artifact says of its training; the same for equal trainings."""
        return {
            "history": [epoch.model_dump() for epoch in self.history],
            "kept_epoch": self.kept.epoch,
        }


def fit(
    start: EagerModel,
    training: Training,
    objective: Objective,
    context: Context,
    task: str,
    *,
    accept_start: bool = False,
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

    Raises:
        StageFailed: a process failed or the loss is not finite; the message tells the root cause.
    """
    training = training.hyper_parameters()
    data = context.need_data(task)
    _check(training, data, context.device, task)
    with _told_as_one_line(task):
        job = _job(start, training, objective, context, data, accept_start)
        history = _history(job, task)
        done = sum(1 for epoch in history if epoch.epoch > 0)
        context.progress(task, done, training.epochs, f"resumed after epoch {done}" if done else "")
        if not is_over(training, history, job.metric):
            _run(job, _teller(job, context, task))
    state = read_state(job.folder)
    if state is None or state.kept is None:
        raise StageFailed(f"{task}: {job.folder} holds no finished epoch")
    module = start.load()
    module.load_state_dict(state.kept_weights)
    log.info("%s: %d epochs, kept epoch %d", task, state.trained_epochs, state.kept.epoch)
    return Fit(module, tuple(state.history), state.kept)


def _check(training: Training, data: Splits, device: str, task: str) -> None:
    """Refuse what cannot be trained, before any process is started."""
    samples, processes = len(data.split("train")), training.parallel.ranks  # type: ignore[arg-type]  # Splits admits sized datasets only
    if samples < processes:
        raise StageFailed(
            f"{task}: split 'train' has {samples} samples for {processes} processes; "
            "lower parallel.processes or bring more data"
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
    if training.parallel.strategy == "dp":
        log.warning("%s: strategy dp runs as one process: %s", task, AGAINST_DP)


def _job(
    start: EagerModel,
    training: Training,
    objective: Objective,
    context: Context,
    data: Splits,
    accept_start: bool,
) -> Job:
    """Return the training as one value, its folder named after all that decides its result."""
    reference = context.named("source") if context.metric.name == "fidelity" else None
    identity = {
        "training": training.model_dump(mode="json"),
        "objective": repr(objective),
        "start": start.digest,
        "data": data.fingerprint(),
        "metric": repr(context.metric),
        "reference": reference.digest if reference else None,
        "seed": context.seed,
        "accept_start": accept_start,
    }
    digest = hashlib.sha256(canonical_json(identity).encode()).hexdigest()
    folder = context.work / f"fit-{digest[:32]}"
    folder.mkdir(exist_ok=True)
    return Job(
        start=start.path.absolute(),
        training=training,
        objective=objective,
        data=data,
        metric=context.metric,
        reference=reference.path.absolute() if reference else None,
        device=context.device,
        threads=max(1, (os.cpu_count() or 1) // training.parallel.ranks),
        seed=context.seed,
        folder=folder.absolute(),
        accept_start=accept_start,
    )


def _history(job: Job, task: str) -> list[Epoch]:
    """Return the epochs that an earlier, interrupted run has entered."""
    earlier = read_state(job.folder)
    if earlier is None:
        return []
    log.info("%s: resumed after epoch %d", task, earlier.trained_epochs)
    return earlier.history


def _teller(job: Job, context: Context, task: str) -> Callable[[Epoch], None]:
    """Return what passes epochs on as progress."""
    total = job.training.epochs

    def tell(epoch: Epoch) -> None:
        value = "" if epoch.metric is None else f" val {job.metric.name} {epoch.metric:.4g}"
        note = f"epoch {epoch.epoch}/{total} loss {epoch.loss:.3g}{value}"
        context.progress(task, epoch.epoch, total, note)

    return tell


def _run(job: Job, tell: Callable[[Epoch], None]) -> None:
    """Train in this process or in several."""
    parallel = job.training.parallel
    if parallel.ranks == 1 and parallel.sharding_mode is None:
        train(job, Alone(), tell)
    else:
        train_on_ranks(job, tell)


@contextmanager
def _told_as_one_line(task: str) -> Iterator[None]:
    """Turn whatever is raised into one error that names the task and the root cause."""
    try:
        yield
    except CompressError as error:
        raise type(error)(f"{task}: {error}") from error
    except Exception as error:
        raise StageFailed(f"{task}: {one_line(error)}") from error
