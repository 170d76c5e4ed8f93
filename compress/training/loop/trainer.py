"""The step loop: what every process of a training runs."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.training.checkpoint.metadata import NO_LOSSES, Epoch, Progress, checkpoints, name_of
from compress.training.distributed.seeding import (
    derive_seed,
    reseed,
    seeded,
    share_of_epoch,
    steps_per_epoch,
)
from compress.training.loop.checkpoint_manager import Checkpointer
from compress.training.loop.cuda_prefetch import on_device
from compress.training.loop.early_stopping import is_better, is_over, plateaus
from compress.training.loop.evaluation import score
from compress.training.loop.loss_meter import Losses, LossMeter, is_constant
from compress.training.loop.step_metrics import watching
from compress.training.loop.train_state import TrainState
from compress.training.objectives.objective import attach_
from compress.training.objectives.weight_constraint import held
from compress.training.optim.optimizer import learning_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from compress.core.metrics import Metric
    from compress.data.splits import Batch, Splits
    from compress.training.config.training import Training
    from compress.training.distributed.base import Strategy
    from compress.training.loop.step_metrics import EpochMetrics, StepMetrics
    from compress.training.objectives.objective import Objective
    from compress.training.objectives.weight_constraint import Constraint


@dataclass(frozen=True)
class Job:
    """All that a training is; it can be pickled, because models travel as their directories."""

    start: Path
    """Directory of the eager model whose weights are trained."""
    training: Training
    objective: Objective
    data: Splits
    metric: Metric
    reference: Path | None
    """Directory of the model that `fidelity` compares with."""
    device: str
    threads: int
    """CPU threads of each process."""
    seed: int
    folder: Path
    """Where the training leaves its state after every epoch."""
    accept_start: bool
    """Whether the model as it came in competes for being kept."""
    constraint: Constraint | None = None
    """What the weights must satisfy in every step."""
    profiles: Path | None = None
    """Where traces and memory snapshots go."""
    trusted: str | None = None
    """Name of the checkpoint that was found whole before the processes were started."""


def train(job: Job, strategy: Strategy, tell: Callable[[EpochMetrics], None]) -> None:
    """Train from where the checkpoints left off; the last of them is the result.

    Args:
        job: what to train.
        strategy: how the processes share the work.
        tell: called by one process when an epoch is on disk, from a thread.

    Raises:
        StageFailed: the loss is not finite, there is nothing to train or to evaluate, or a
            checkpoint cannot be written.
    """
    training = job.training
    with (
        cpu_threads(job.threads),
        job.data.keep_workers(),
        seeded(job.seed, job.device),
        watching(job, strategy) as watch,
    ):
        module = strategy.load(EagerModel.from_directory(job.start), job.device)
        loss = job.objective.prepare(job.device)
        example = partial(few_samples, job)
        attach_(loss, module, example)
        hold = held(job.constraint, module, training.epochs * _steps_per_epoch(job))
        learner = TrainState.create(module, loss, training, strategy, job.device, example, hold)
        with Checkpointer(job.folder, training.checkpoints, strategy) as checkpointer:
            progress = checkpointer.resume(learner, job.trusted) or _begun(job, learner)
            while not is_over(training, progress.history, job.metric):
                progress = _epoch(learner, job, progress, checkpointer, watch)
                step = progress.trained_epochs * _steps_per_epoch(job)
                told = partial(tell, watch.measured(progress.history[-1]))
                checkpointer.save(step, progress, learner, told)
            checkpointer.wait()


def _epoch(
    learner: TrainState,
    job: Job,
    progress: Progress,
    checkpointer: Checkpointer,
    watch: StepMetrics,
) -> Progress:
    """Train what is left of an epoch, and return the progress after it.

    Raises:
        StageFailed: the loss is not finite, in one step or, where steps are left out, in all.
    """
    training, strategy, number = job.training, learner.strategy, progress.trained_epochs + 1
    fallen = plateaus(progress.history, job.metric, training.epochs_per_fall)
    steps, rate = _steps_per_epoch(job), 0.0
    tally = LossMeter(progress.losses)
    learner.wrapped.train()
    remaining = watch.steps(_steps(job, strategy, number, progress.steps))
    for done, batches in enumerate(remaining, progress.steps):
        step = (number - 1) * steps + done
        rate = learning_rate(training, step, training.epochs * steps, fallen)
        reseed(derive_seed(job.seed, number, strategy.rng_stream, done), job.device)
        value = learner.step(batches, rate, step)
        tally.add(value)
        if not math.isfinite(value) and training.on_nan == "stop":
            checkpointer.let_finish()
            raise StageFailed(_not_finite(job, value, number, done + 1, rate, batches))
        if checkpointer.due(done + 1) and done + 1 < steps:
            within = {"steps": done + 1, "losses": tally.over_all(strategy)}
            checkpointer.save(step + 1, _saved(progress, learner, **within), learner)
    losses = tally.over_all(strategy)
    if not losses[1]:
        raise StageFailed(f"the loss was not finite in any step of epoch {number}")
    return _close(job, progress, learner, losses, rate, taken=steps - progress.steps)


@contextmanager
def cpu_threads(threads: int) -> Iterator[None]:
    """Run a block on a number of CPU threads."""
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def few_samples(job: Job) -> Batch:
    """Return some of the samples trained on, the same in every process."""
    pipeline = job.training.parallel.pipeline
    samples = min(len(job.data.split("train")), pipeline.microbatches if pipeline else 2)  # type: ignore[arg-type]
    batch = next(iter(job.data.read("train", range(samples), samples, job.seed)))
    return batch.to(job.device)


def _steps(job: Job, strategy: Strategy, number: int, first: int) -> Iterator[list[Batch]]:
    """Yield the batches of each step of an epoch on this rank, from the first that is left."""
    training, dataset = job.training, job.data.split("train")
    share = share_of_epoch(
        len(dataset),  # type: ignore[arg-type]  # Splits admits datasets with a length only
        training.batch_size,
        job.seed,
        number,
        strategy.rank,
        strategy.ranks,
        job.data.lengths("train"),
    )
    own = training.batch_size // strategy.ranks
    part = own // training.accumulate
    seed = derive_seed(job.seed, number, strategy.rank)
    read = job.data.read("train", share, part, seed, first=first * own)
    batches = on_device(read, job.device)
    yield from _grouped(batches, training.accumulate)


def _grouped(batches: Iterable[Batch], count: int) -> Iterator[list[Batch]]:
    remaining = iter(batches)
    while group := list(islice(remaining, count)):
        yield group


def _steps_per_epoch(job: Job) -> int:
    samples = len(job.data.split("train"))  # type: ignore[arg-type]
    return steps_per_epoch(samples, job.training.batch_size)


def _not_finite(
    job: Job, value: float, number: int, step: int, rate: float, batches: Sequence[Batch]
) -> str:
    where = f"the loss is {value} in epoch {number}, step {step}"
    targets = [batch.target for batch in batches if batch.target is not None]
    if not all(bool(target.isfinite().all()) for target in targets):
        return (
            f"{where}: targets are NaN or infinite, or a sample has none; give each one, or "
            "distill from a teacher, which takes samples without"
        )
    good = checkpoints(job.folder)
    state = f"; the last good checkpoint is {good[-1]}" if good else ""
    return (
        f"{where}, at learning rate {rate:.3g}; "
        f"lower learning_rate, set clip_norm or on_nan: skip{state}"
    )


def _begun(job: Job, learner: TrainState) -> Progress:
    """Return the progress before the first epoch."""
    if not job.accept_start:
        return Progress()
    metric = score(job, learner.module, learner.strategy)
    start = Epoch(epoch=0, loss=None, metric=metric, learning_rate=None)
    return Progress(history=(start,), kept=start)


def _close(
    job: Job, progress: Progress, learner: TrainState, losses: Losses, rate: float, taken: int
) -> Progress:
    """Evaluate an epoch, of which so many steps were taken here, and enter it into the progress."""
    number = progress.trained_epochs + 1
    try:
        with learner.ema_weights() as module:
            metric = score(job, module, learner.strategy)
    except StageFailed as error:
        raise StageFailed(f"after epoch {number}, at learning rate {rate:.3g}: {error}") from error
    epoch = Epoch(
        epoch=number,
        loss=float(Fraction(losses[0]) / losses[1]),
        constant_loss=is_constant(losses),
        metric=metric,
        learning_rate=rate,
        sent_bytes=learner.strategy.sent_bytes(taken),
        sent_between_bytes=learner.strategy.sent_between_bytes(taken),
    )
    changed: dict[str, Any] = {"history": (*progress.history, epoch)}
    better = job.training.keep == "last" or is_better(epoch, progress.kept, job.metric)
    if better and (not job.constraint or job.constraint.is_met(number / job.training.epochs)):
        changed |= {"kept": epoch, "kept_in": name_of(number * _steps_per_epoch(job))}
    return _saved(progress, learner, steps=0, losses=NO_LOSSES, **changed)


def _saved(progress: Progress, learner: TrainState, **changed: Any) -> Progress:
    """Return the progress with changes and what is not a tensor of the learner's state."""
    layout = learner.training.parallel.layout
    layouts = progress.layouts if layout in progress.layouts[-1:] else (*progress.layouts, layout)
    own = {"scaler": learner.scaler.state_dict(), "layouts": layouts}
    return progress.model_copy(update=own | changed)
