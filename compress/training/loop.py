"""The step loop: what every process of a training runs."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compress.core.artifact import Artifact
from compress.core.eager import EagerModel, flatten_outputs, predicting
from compress.core.errors import StageFailed
from compress.core.metrics import evaluate
from compress.training.optimizer import build_optimizer, learning_rate, set_learning_rate_
from compress.training.randomness import derive_seed, seeded, share_of_epoch, steps_per_epoch
from compress.training.resume import Epoch, State, copy_of, read_state, write_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from compress.core.data import Splits
    from compress.core.metrics import Metric
    from compress.training.objective import LossFunction, Objective
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
        optimizer = build_optimizer(module, job.training)
        state = _resume_(job, module, optimizer) or _begin(job, module, strategy)
        loss = job.objective.prepare(job.device)
        wrapped = strategy.wrap(module)
        if state.trained_epochs:
            strategy.recall(job.folder, state.trained_epochs)
        for number in range(state.trained_epochs + 1, job.training.epochs + 1):
            with seeded(derive_seed(job.seed, number, strategy.rank), job.device):
                mean_loss = strategy.mean(
                    train_epoch_(wrapped, optimizer, loss, job, number, strategy)
                )
            sent_bytes = strategy.sent_bytes(_steps(job))
            strategy.remember(job.folder, number)
            if strategy.rank == 0:
                epoch = _close(job, state, module, number, mean_loss, sent_bytes)
                state.optimizer = optimizer.state_dict()
                write_state(job.folder, state)
                tell(epoch)
            strategy.wait()


def train_epoch_(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: LossFunction,
    job: Job,
    number: int,
    strategy: Strategy,
) -> float:
    """Train for one epoch, in place, and return this rank's mean loss.

    Raises:
        StageFailed: the loss is not finite.
    """
    training, dataset = job.training, job.data.split("train")
    samples = len(dataset)  # type: ignore[arg-type]  # Splits admits datasets with a length only
    share = share_of_epoch(
        samples,
        training.batch_size,
        job.seed,
        number,
        strategy.rank,
        strategy.ranks,
        job.data.lengths("train"),
    )
    steps = steps_per_epoch(samples, training.batch_size)
    total = 0.0
    module.train()
    part, seed = training.batch_size // strategy.ranks, derive_seed(job.seed, number, strategy.rank)
    batches = job.data.read("train", share, part, seed)
    for index, batch in enumerate(batches):
        step = (number - 1) * steps + index
        rate = learning_rate(training, step, training.epochs * steps)
        set_learning_rate_(optimizer, rate)
        moved = batch.to(job.device)
        mean = loss(flatten_outputs(module(*moved.inputs)), moved)
        value = mean.item()
        if not math.isfinite(value):
            raise StageFailed(
                f"the loss is {value} in epoch {number}, step {index + 1}, at learning rate "
                f"{rate:.3g}; lower learning_rate or set clip_norm"
            )
        optimizer.zero_grad()
        torch.autograd.backward(mean)
        if training.clip_norm:
            torch.nn.utils.clip_grad_norm_(module.parameters(), training.clip_norm)
        optimizer.step()
        total += value
    return total / steps


def score(job: Job, module: torch.nn.Module) -> float | None:
    """Return the module's metric on every sample of `val`, or None without that split."""
    if "val" not in job.data.datasets:
        return None
    threads = torch.get_num_threads()
    reference = (
        Artifact.at(job.reference).open(job.device, threads) if job.reference else nullcontext()
    )
    with predicting(module.eval(), job.device, threads) as predict, reference as expected:
        return evaluate(predict, job.data, "val", job.metric, expected)


@contextmanager
def cpu_threads(threads: int) -> Iterator[None]:
    """Run a block on a number of CPU threads."""
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _begin(job: Job, module: torch.nn.Module, strategy: Strategy) -> State:
    """Return the state before the first epoch."""
    if not job.accept_start or strategy.rank > 0:
        return State()
    start = Epoch(epoch=0, loss=None, metric=score(job, module), learning_rate=None)
    return State(history=[start], kept=start, kept_weights=copy_of(module.state_dict()))


def _resume_(job: Job, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State | None:
    """Put module and optimizer where the last state on disk left them, in place."""
    state = read_state(job.folder)
    if state is not None:
        module.load_state_dict(state.weights)
        optimizer.load_state_dict(state.optimizer)
    return state


def _steps(job: Job) -> int:
    return steps_per_epoch(len(job.data.split("train")), job.training.batch_size)  # type: ignore[arg-type]


def _close(
    job: Job,
    state: State,
    module: torch.nn.Module,
    number: int,
    loss: float,
    sent_bytes: int | None,
) -> Epoch:
    """Evaluate an epoch and enter it into the state."""
    steps = _steps(job)
    rate = learning_rate(job.training, number * steps - 1, job.training.epochs * steps)
    epoch = Epoch(
        epoch=number,
        loss=loss,
        metric=score(job, module),
        learning_rate=rate,
        sent_bytes=sent_bytes,
    )
    state.history.append(epoch)
    state.weights = copy_of(module.state_dict())
    if job.training.keep == "last" or is_better(epoch, state.kept, job.metric):
        state.kept, state.kept_weights = epoch, state.weights
    return epoch


def is_better(epoch: Epoch, kept: Epoch | None, metric: Metric) -> bool:
    """Whether an epoch is to be kept instead of the one kept so far.

    Among trained epochs the later one wins a tie; the model as it came in must be beaten.
    """
    if kept is None or kept.metric is None or epoch.metric is None:
        return True
    gain = -metric.drop_points(kept.metric, epoch.metric)
    return gain > 0 or (gain == 0 and kept.epoch > 0)
