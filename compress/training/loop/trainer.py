"""The training loop that every process runs: epochs of steps, each with metric and checkpoint."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.common.foreign.lock_waits import bounded_lock_waits
from compress.common.process import derive_seed, reseed, seeded
from compress.data.fingerprint import hash_of_state
from compress.data.stream import StreamReader
from compress.data.targets import flatten
from compress.training.checkpoint import (
    NO_LOSSES,
    Epoch,
    TrainProgress,
    checkpoint_name,
    checkpoints,
    no_group_expected,
)
from compress.training.distributed.base import share_of_epoch
from compress.training.loop.checkpoint_manager import CheckpointManager
from compress.training.loop.evaluation import evaluate, is_better, is_finished
from compress.training.loop.step_metrics import LossMeter, is_constant, recording_metrics
from compress.training.loop.train_state import SMALLEST_LOSS_SCALE, TrainState
from compress.training.objectives.objective import attach_
from compress.training.optim.compile import matmul_precision, memory_budget
from compress.training.optim.lr_scheduler import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from compress.data.batch import Batch
    from compress.data.dataloader import Reader
    from compress.data.splits import Splits
    from compress.training.checkpoint import LossSum
    from compress.training.distributed.base import Strategy
    from compress.training.loop.job import Job
    from compress.training.loop.step_metrics import StepMetrics, TrainingRecord

    Ready = Callable[[], Batch]
    """Waits for a copy, and returns it."""

COMPARED_SAMPLES = 8
"""First samples of a stream that processes compare."""


def train(job: Job, strategy: Strategy, on_record: Callable[[TrainingRecord], None]) -> None:
    """Train from the newest checkpoint on, or from the start; the last checkpoint is the result.

    The main process calls ``on_record`` every `Job.record_every` steps, and when an epoch's
    checkpoint is on disk.
    """
    training = job.training
    with (
        bounded_lock_waits(),
        cpu_threads(job.threads),
        matmul_precision(training),
        memory_budget(training),
        job.data.keep_workers(),
        seeded(job.seed, job.device),
        no_group_expected(),
        recording_metrics(job, strategy) as metrics,
    ):
        # The first read forks the data workers: before NCCL runs, beside which a fork may hang.
        for name in job.data.datasets.keys() & {"train", "val"}:
            list(job.data.read(name, (), 1))
        stream = job.data.open_stream(job.seed)
        if stream is not None:
            list(stream.read((), 1, job.seed))
            _refuse_divided(job.data, strategy, job.seed)
        module = strategy.load(EagerModel.from_directory(job.start), job.device)
        loss = job.objective.prepare(job.device)
        # Its hooks and parameters must be there before the module is compiled and wrapped.
        attach_(loss, module, job.example_batch)
        step_context = None
        if job.constraint:
            step_context = partial(job.constraint.around, module, steps=job.total_steps)
        state = TrainState(
            module, loss, training, strategy, job.device, job.example_batch, step_context, job.seed
        )
        with CheckpointManager(job.folder, training.checkpoints, strategy) as manager:
            progress = manager.resume(state, job.trusted)
            if progress is None:
                progress = TrainProgress()
                if job.accept_start:
                    metric = evaluate(job, module, strategy)
                    start = Epoch(epoch=0, loss=None, metric=metric, learning_rate=None)
                    progress = TrainProgress(history=(start,), kept=start)
            schedule = Schedule(
                state.optimizer, training, job.steps_per_epoch, job.metric, job.code_folder
            )
            schedule.fast_forward(progress.history, progress.steps)
            while not is_finished(training, progress.history, job.metric):
                progress = _train_epoch(
                    state, job, progress, stream, manager, metrics, schedule, on_record
                )
                schedule.finish_epoch(progress.history[-1])
                step = progress.trained_epochs * job.steps_per_epoch
                report = partial(on_record, metrics.of_epoch(progress.history[-1]))
                manager.save(step, progress, state, report)
            manager.wait()


def _refuse_divided(data: Splits, strategy: Strategy, seed: int) -> None:
    """Raise StageFailed where a stream gives each process other samples, of which most are lost."""
    assert data.stream is not None
    first = StreamReader(data.stream, seed).first_samples(COMPARED_SAMPLES)
    # As many bits as a float64 holds exactly, also of their sum.
    number = float(int.from_bytes(hash_of_state(first)[:4], "little"))
    if strategy.sum_over_ranks([number])[0] != number * strategy.ranks:
        raise StageFailed(
            "split 'train' is a stream that divides itself by rank, and so does training, which "
            "would lose most samples; give the whole stream to every process (leave out "
            "split_dataset_by_node, split_by_node or your own division)"
        )


def _train_epoch(
    state: TrainState,
    job: Job,
    progress: TrainProgress,
    stream: Reader | None,
    manager: CheckpointManager,
    metrics: StepMetrics,
    schedule: Schedule,
    on_record: Callable[[TrainingRecord], None],
) -> TrainProgress:
    """Train the rest of an epoch, evaluate it, and return the progress after it."""
    training, strategy = job.training, state.strategy
    every = training.checkpoints.every_steps
    epoch, steps, rate = progress.trained_epochs + 1, job.steps_per_epoch, 0.0
    losses = LossMeter(progress.losses)
    state.wrapped.train()
    remaining_steps = metrics.timed(_micro_batches(job, strategy, epoch, progress.steps, stream))
    for index, micro_batches in enumerate(remaining_steps, progress.steps):
        step = (epoch - 1) * steps + index
        rate = schedule.learning_rate
        schedule.apply_()
        # Every step has its own seed: a run resumed at any step draws what it would have drawn.
        reseed(derive_seed(job.seed, epoch, strategy.rng_stream, index), job.device)
        is_recorded = job.record_every is not None and (step + 1) % job.record_every == 0
        loss = state.train_step(micro_batches, step, measure_norm=is_recorded)
        schedule.step()
        losses.add(loss)
        # In fp16 a loss that overflows lowers the loss scale first.
        stops = training.on_nan == "stop" and training.precision != "fp16"
        if (stops and not math.isfinite(loss)) or state.loss_scale < SMALLEST_LOSS_SCALE:
            if manager.pending:
                manager.pending.exception()  # the message names the last checkpoint on disk
            raise StageFailed(_explain_loss(job, loss, epoch, index + 1, rate, micro_batches))
        if is_recorded:
            record = metrics.of_step(epoch, step + 1, loss, rate, state.gradient_norm)
            if strategy.is_main:
                on_record(record)
        manager.notify_if_written()
        # The checkpoint after the last step is that of the epoch, with its metric.
        if every and (index + 1) % every == 0 and index + 1 < steps:
            changed = {"steps": index + 1, "losses": losses.over_all(strategy)}
            manager.save(step + 1, _updated(progress, state, **changed), state)
    summed = losses.over_all(strategy)
    if not summed[1]:
        raise StageFailed(f"the loss was not finite in any step of epoch {epoch}")
    return _finish_epoch(job, progress, state, summed, rate, steps - progress.steps)


def _micro_batches(
    job: Job, strategy: Strategy, epoch: int, first_step: int, stream: Reader | None
) -> Iterator[list[Batch]]:
    """Yield this rank's micro-batches for each step of an epoch, from a step on."""
    training, rank, ranks = job.training, strategy.rank, strategy.ranks
    rank_batch = training.batch_size // ranks
    micro_batch, first = rank_batch // training.accumulate, first_step * rank_batch
    if stream is not None:
        # As below, each rank takes every ``ranks``-th sample, for the same steps on any number.
        samples = job.steps_per_epoch * training.batch_size
        start = (epoch - 1) * (samples if training.steps_per_epoch else job.train_samples)
        share: Sequence[int] = range(start + rank, start + samples, ranks)
        read = stream.read(share, micro_batch, job.seed, first)
    else:
        samples, lengths = job.train_samples, job.data.lengths("train")
        share = share_of_epoch(samples, training.batch_size, job.seed, epoch, rank, ranks, lengths)
        read = job.data.read("train", share, micro_batch, derive_seed(job.seed, epoch), first)
    batches = on_device(read, job.device)
    while step := list(islice(batches, training.accumulate)):
        yield step


def _finish_epoch(
    job: Job, progress: TrainProgress, state: TrainState, losses: LossSum, rate: float, taken: int
) -> TrainProgress:
    """Evaluate the weights after an epoch and add the epoch to the progress before it.

    ``rate`` is that of its last step; ``taken`` steps are fewer than all where it was resumed.
    """
    number = progress.trained_epochs + 1
    try:
        with state.ema.applied() if state.ema else nullcontext():
            metric = evaluate(job, state.module, state.strategy)
    except StageFailed as error:
        raise StageFailed(f"after epoch {number}, at learning rate {rate:.3g}: {error}") from error
    epoch = Epoch(
        epoch=number,
        loss=float(Fraction(losses[0]) / losses[1]),
        constant_loss=is_constant(losses),
        metric=metric,
        learning_rate=rate,
        sent_bytes=state.strategy.sent_bytes(taken),
        sent_between_bytes=state.strategy.sent_between_bytes(taken),
    )
    changed: dict[str, Any] = {"history": (*progress.history, epoch)}
    better = job.training.keep == "last" or is_better(epoch, progress.kept, job.metric)
    if better and (not job.constraint or job.constraint.is_met(number / job.training.epochs)):
        changed |= {"kept": epoch, "kept_in": checkpoint_name(number * job.steps_per_epoch)}
    return _updated(progress, state, steps=0, losses=NO_LOSSES, **changed)


def _updated(progress: TrainProgress, state: TrainState, **changed: Any) -> TrainProgress:
    """Return the progress with changes, the loss scale and the layout of the processes."""
    layout = state.training.parallel.layout
    layouts = progress.layouts if layout in progress.layouts[-1:] else (*progress.layouts, layout)
    own = {"scaler": state.scaler.state_dict(), "layouts": layouts}
    return progress.model_copy(update=own | changed)


def _explain_loss(
    job: Job, loss: float, epoch: int, step: int, rate: float, batches: Sequence[Batch]
) -> str:
    """Return the message for a loss that is not finite, with the likely cause."""
    where = f"the loss is {loss} in epoch {epoch}, step {step}"
    targets = [target for batch in batches for target in flatten(batch.target)[0]]
    if not all(bool(target.isfinite().all()) for target in targets):
        return (
            f"{where}: targets are NaN or infinite, or a sample has none; give each one, or "
            "distill from a teacher, which takes samples without"
        )
    intact = checkpoints(job.folder)
    last = f"; the last good checkpoint is {intact[-1]}" if intact else ""
    if job.training.precision == "fp16":
        return (
            f"{where}, at learning rate {rate:.3g}, and fp16 overflows even where the loss is not "
            f"scaled up; use precision: bf16, lower learning_rate or set clip_norm{last}"
        )
    return (
        f"{where}, at learning rate {rate:.3g}; "
        f"lower learning_rate, set clip_norm or on_nan: skip{last}"
    )


@contextmanager
def cpu_threads(threads: int) -> Iterator[None]:
    """Limit torch to a number of CPU threads inside the block."""
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def on_device(batches: Iterable[Batch], device: str) -> Iterator[Batch]:
    """Yield batches on a device; on CUDA the copy of the next one has already started."""
    if not device.startswith("cuda"):
        yield from batches
        return
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    yield from one_ahead(batches, lambda batch: start_copy(batch, device, copies))


def one_ahead(batches: Iterable[Batch], start: Callable[[Batch], Ready]) -> Iterator[Batch]:
    """Yield each copied batch after ``start`` has begun to copy the next one."""
    pending: Ready | None = None
    for batch in batches:
        previous, pending = pending, start(batch)
        if previous is not None:
            yield previous()
    if pending is not None:
        yield pending()


def start_copy(batch: Batch, device: str, copies: torch.cuda.Stream) -> Ready:
    """Start to copy a batch on a separate stream; from pinned memory this does not block."""
    with torch.cuda.stream(copies):
        moved = batch.to(device)
        copied = copies.record_event()

    def ready() -> Batch:
        # Not wait_stream: the copy of the next batch is already queued on that stream.
        computing = torch.cuda.current_stream(device)
        computing.wait_event(copied)
        for tensor in moved.tensors():
            # Allocated on the copying stream: the allocator may otherwise reuse it there while
            # the step still reads it.
            tensor.record_stream(computing)
        return moved

    return ready
