"""The step loop: what every process of a training runs."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import torch

from compress.core.eager import EagerModel
from compress.core.errors import StageFailed
from compress.training.learner import Learner
from compress.training.optimizer import learning_rate
from compress.training.progress import is_better, is_over, plateaus
from compress.training.randomness import derive_seed, seeded, share_of_epoch, steps_per_epoch
from compress.training.resume import Epoch, State, read_state, write_state
from compress.training.validation import score

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from compress.core.data import Batch, Splits
    from compress.core.metrics import Metric
    from compress.training.objective import Objective
    from compress.training.parallel import Strategy
    from compress.training.settings import Training


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


def train(job: Job, strategy: Strategy, tell: Callable[[Epoch], None]) -> None:
    """Train from where the state on disk left off; the last state on disk is the result.

    Args:
        job: what to train.
        strategy: how the processes share the work.
        tell: called by rank 0 after each epoch.

    Raises:
        StageFailed: the loss is not finite, or there is nothing to train or to evaluate.
    """
    with cpu_threads(job.threads), job.data.keeping_workers():
        module = EagerModel.at(job.start).load(job.device)
        loss = job.objective.prepare(job.device)
        learner = Learner.of(module, loss, job.training, strategy, job.device)
        state = _resumed(job, learner) or _begun(job, learner)
        while not is_over(job.training, state.history, job.metric):
            number = state.trained_epochs + 1
            with seeded(derive_seed(job.seed, number, strategy.rank), job.device):
                mean_loss, rate = train_epoch(learner, job, state)
            strategy.remember(job.folder, number)
            epoch = _close(job, state, learner, number, mean_loss, rate)
            if strategy.rank == 0:
                write_state(job.folder, state)
                tell(epoch)
            strategy.wait()


def train_epoch(learner: Learner, job: Job, state: State) -> tuple[float, float]:
    """Train for one epoch, and return the mean loss over all ranks and the last learning rate.

    Raises:
        StageFailed: the loss is not finite, in one step or, where steps are left out, in all.
    """
    training, strategy, number = job.training, learner.strategy, state.trained_epochs + 1
    fallen = plateaus(state.history, job.metric, training.epochs_per_fall)
    steps = _steps_per_epoch(job)
    values, rate = [], 0.0
    learner.wrapped.train()
    for index, batches in enumerate(_steps(job, strategy, number)):
        step = (number - 1) * steps + index
        rate = learning_rate(training, step, training.epochs * steps, fallen)
        value = learner.step(batches, rate, step)
        if math.isfinite(value):
            values.append(value)
        elif training.on_nan == "stop":
            raise StageFailed(_not_finite(job, value, number, index + 1, rate))
    if not values:
        raise StageFailed(f"the loss was not finite in any step of epoch {number}")
    return strategy.total([sum(values) / len(values)])[0] / strategy.ranks, rate


@contextmanager
def cpu_threads(threads: int) -> Iterator[None]:
    """Run a block on a number of CPU threads."""
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _steps(job: Job, strategy: Strategy, number: int) -> Iterator[list[Batch]]:
    """Yield the batches of each step of an epoch on this rank."""
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
    part = training.batch_size // strategy.ranks // training.accumulate
    seed = derive_seed(job.seed, number, strategy.rank)
    yield from _grouped(job.data.read("train", share, part, seed), training.accumulate)


def _grouped(batches: Iterable[Batch], count: int) -> Iterator[list[Batch]]:
    remaining = iter(batches)
    while group := list(islice(remaining, count)):
        yield group


def _steps_per_epoch(job: Job) -> int:
    samples = len(job.data.split("train"))  # type: ignore[arg-type]
    return steps_per_epoch(samples, job.training.batch_size)


def _not_finite(job: Job, value: float, number: int, step: int, rate: float) -> str:
    last = f"; the state after epoch {number - 1} is in {job.folder}" if number > 1 else ""
    return (
        f"the loss is {value} in epoch {number}, step {step}, at learning rate {rate:.3g}; "
        f"lower learning_rate, set clip_norm or on_nan: skip{last}"
    )


def _begun(job: Job, learner: Learner) -> State:
    """Return the state before the first epoch."""
    if not job.accept_start:
        return State()
    metric = score(job, learner.module, learner.strategy)
    start = Epoch(epoch=0, loss=None, metric=metric, learning_rate=None)
    weights = learner.strategy.weights(learner.module)
    return State(history=[start], kept=start, kept_weights=weights)


def _resumed(job: Job, learner: Learner) -> State | None:
    """Put everything where the last state on disk left it, and return that state."""
    state = read_state(job.folder)
    if state is not None:
        learner.restore(state)
        learner.strategy.recall(job.folder, state.trained_epochs)
    return state


def _close(
    job: Job, state: State, learner: Learner, number: int, loss: float, rate: float
) -> Epoch:
    """Evaluate an epoch and enter it into the state."""
    with learner.as_kept() as module:
        metric = score(job, module, learner.strategy)
    learner.save_to(state)
    sent = learner.strategy.sent_bytes(_steps_per_epoch(job))
    epoch = Epoch(epoch=number, loss=loss, metric=metric, learning_rate=rate, sent_bytes=sent)
    state.history.append(epoch)
    if job.training.keep == "last" or is_better(epoch, state.kept, job.metric):
        state.kept, state.kept_weights = epoch, state.average or state.weights
    return epoch
