"""The training loop that every process runs: epochs of steps, each with metric and checkpoint.

Early stopping keeps no state, so that a resumed training decides as an uninterrupted one.
"""

from __future__ import annotations

import math
import re
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.common.foreign.lock_waits import bounded_lock_waits
from compress.common.forward import Predictor, flatten_outputs, plain_attention, split_batches
from compress.common.process import derive_seed, reseed, seeded, torch_threads
from compress.data.dataloader import Reader, StreamReader
from compress.data.fingerprint import hash_of_state
from compress.data.targets import flatten, select
from compress.training.checkpoint import (
    NO_LOSSES,
    Epoch,
    TrainProgress,
    checkpoint_name,
    checkpoints,
)
from compress.training.distributed.base import Strategy, share_of_epoch
from compress.training.loop.metrics import LossMeter, OnRecord, StepMetrics, recording_metrics
from compress.training.loop.train_state import (
    SMALLEST_LOSS_SCALE,
    CheckpointManager,
    TrainState,
    autocast,
)
from compress.training.objectives.objective import attach_
from compress.training.optim.optimizer import Schedule
from compress.training.optim.transformer_blocks import matmul_precision, memory_budget

if TYPE_CHECKING:
    from compress.core.metrics import Metric
    from compress.data.batch import Batch
    from compress.data.splits import Splits
    from compress.training.checkpoint import LossSum
    from compress.training.config.training import Training
    from compress.training.loop.train_state import Job

    Ready = Callable[[], Batch]
    """Waits for a copy, and returns it."""

COMPARED_SAMPLES = 8  # first samples of a stream that processes compare


def train(job: Job, strategy: Strategy, on_record: OnRecord) -> None:
    """Train from the newest checkpoint on, or from the start; the last checkpoint is the result.

    The main process calls ``on_record`` every `Job.record_every` steps, and when an epoch's
    checkpoint is on disk.
    """
    training = job.training
    with (
        bounded_lock_waits(),
        torch_threads(job.threads),
        matmul_precision(training),
        memory_budget(training),
        job.data.keep_workers(),
        seeded(job.seed, job.device),
        warnings.catch_warnings(),
        recording_metrics(job, strategy) as metrics,
    ):
        # Checkpoints of one process are intended. Not around each call: threads warn of them too.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
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
    on_record: OnRecord,
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
        scales = training.precision == "fp16"
        stops = training.on_nan == "stop" and not scales
        if (stops and not math.isfinite(loss)) or state.loss_scale < SMALLEST_LOSS_SCALE:
            if manager.pending:
                manager.pending.exception()  # the message names the last checkpoint on disk
            gradient = ""
            if state.gradient_norm is not None and strategy.processes == 1 and not scales:
                reseed(derive_seed(job.seed, epoch, strategy.rng_stream, index), job.device)
                gradient = _gradient_source(state, micro_batches)
            where = f"in epoch {epoch}, step {index + 1}"
            raise StageFailed(_explain_loss(job, loss, where, rate, micro_batches, gradient))
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
        raise StageFailed(
            f"the loss, or its gradient, was not finite in any step of epoch {epoch}; on_nan: stop "
            "names the first"
        )
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
    total, count, values = losses
    try:
        with state.ema.applied() if state.ema else nullcontext():
            metric = evaluate(job, state.module, state.strategy)
    except StageFailed as error:
        raise StageFailed(f"after epoch {number}, at learning rate {rate:.3g}: {error}") from error
    epoch = Epoch(
        epoch=number,
        loss=float(Fraction(total) / count),
        # To the last bit the same in several steps, or 0 in any number of them.
        constant_loss=len(values) == 1 and (count > 1 or not values[0]),
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


def _gradient_source(state: TrainState, batches: Sequence[Batch]) -> str:
    """Say where gradients that are not finite begin, and which parameters get them; may be ''."""
    bad, operation, lines = list[str](), "", list[tuple[str, str, str]]()
    for is_traced in (False, True):
        state.optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught, suppress(Exception):
            warnings.simplefilter("always")
            # It raises at the first NaN on the way back, and warns with the call it belongs to.
            with torch.autograd.set_detect_anomaly(is_traced):
                for batch in (cpu_batch.to(state.device) for cpu_batch in batches):
                    with state.autocast():
                        loss = state.loss(flatten_outputs(state.wrapped(*batch.inputs)), batch)
                    state.strategy.backward(state.wrapped, loss)
            gradients = ((name, p.grad) for name, p in state.module.named_parameters())
            bad = [name for name, x in gradients if x is not None and not x.isfinite().all()]
        for text in (str(warning.message) for warning in caught):
            operation = "".join(re.findall(r"Error detected in (\w+?)(?:Backward\d*)?\.", text))
            calls = re.findall(r'File "(.+)", line (\d+), in .*\n +(.*)', text)
            lines = [call for call in calls if "/site-packages/torch/" not in call[0]] or lines
    if not bad:
        return ""
    names = f"{', '.join(bad[:3])}{' …' if len(bad) > 3 else ''}"
    place = "".join(f", {Path(file).name}:{number} ({code})" for file, number, code in lines[-1:])
    turns = f"; it turns NaN at {operation}{place}" if operation else ""
    return f"the gradient of {names} ({len(bad)} in all) is not finite{turns}"


def _explain_loss(
    job: Job, loss: float, where: str, rate: float, batches: Sequence[Batch], gradient: str
) -> str:
    where, step = f"the loss is {loss} {where}", where
    targets = [target for batch in batches for target in flatten(batch.target)[0]]
    if not all(bool(target.isfinite().all()) for target in targets):
        return (
            f"{where}: targets are NaN or infinite, or a sample has none; give each one, or "
            "distill from a teacher, which takes samples without"
        )
    intact = checkpoints(job.folder)
    last = f"; the last good checkpoint is {intact[-1]}" if intact else ""
    if gradient:
        return (
            f"{step}, at learning rate {rate:.3g}: {gradient}. The root, norm or logarithm of 0 "
            "has no finite gradient: add a small number within it, as sqrt(x + 1e-8), or set "
            f"on_nan: skip; where losses grow before, lower learning_rate{last}"
        )
    if job.training.parallel.ranks > 1:
        last = f"; one process says whether it begins with a gradient that is NaN, and where{last}"
    if job.training.precision == "fp16":
        return (
            f"{where}, at learning rate {rate:.3g}, and fp16 overflows even where the loss is not "
            f"scaled up; use precision: bf16, lower learning_rate or set clip_norm{last}"
        )
    return (
        f"{where}, at learning rate {rate:.3g}; "
        f"lower learning_rate, set clip_norm or on_nan: skip{last}"
    )


def evaluate(job: Job, module: torch.nn.Module, strategy: Strategy) -> float | None:
    """Compute a module's metric on all samples of `val`; None without that split or a metric."""
    if "val" not in job.data.datasets or not job.metric.is_measured:
        return None
    # Buffers such as BatchNorm's follow each process's own batches; all evaluate with rank 0's.
    strategy.broadcast_buffers_(module)
    module.eval()
    samples = len(job.data.split("val"))  # type: ignore[arg-type]  # Splits admits sized datasets only
    share = range(strategy.rank, samples, strategy.ranks)
    # Every rank runs the same number of batches, because a sharded model's forward is a collective;
    # shorter shares are padded with sample 0, whose outputs are dropped.
    padded = array("q", share)
    padded.extend([0] * (-(-samples // strategy.ranks) - len(share)))

    def predict(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Weights that FSDP gathers in bf16 meet float32 buffers under autocast only. Not inference
        # mode: FSDP reuses the gathered weights in the next training step.
        rounded = job.training.gathers_rounded
        precision = autocast(job.training, job.device) if rounded else nullcontext()
        with torch.no_grad(), precision, plain_attention():
            return flatten_outputs(module(*(x.to(job.device) for x in inputs)))

    answer = split_batches(predict, job.fixed_batch) if job.fixed_batch else predict
    opened: AbstractContextManager[Predictor | None] = nullcontext()
    if job.reference:
        artifact = Artifact.from_directory(job.reference)
        opened = artifact.open(job.device, torch.get_num_threads())
    meter = job.metric.meter()
    remaining = len(share)
    with opened as reference:
        for batch in job.data.read("val", padded, job.data.batch_size):
            own = slice(remaining)
            remaining = max(0, remaining - len(batch))
            # A function of all outputs gets those of all ranks in order: none may be left out.
            adds = strategy.ranks == 1 or not meter.keeps_outputs
            if adds and job.metric.passes_over(batch):
                answer(*batch.inputs)  # the other ranks' forward may wait for this one
                continue
            targets = job.metric.targets_of(batch, "val", reference)
            for inputs, known in job.metric.parts(batch.inputs, targets):
                outputs = answer(*inputs)
                meter.update(job.metric.outputs_read(outputs, own), select(known, own))
    strategy.release_buffers_(module)
    shares, value = strategy.gather_shares(meter.state()), 0.0
    if shares is not None:
        meter.add_shares_(shares)
        value = meter.compute()
    # Only the first share's processes have the value; the sum gives it to all.
    return job.metric.require_finite(strategy.sum_over_ranks([value])[0], "val")


def is_better(epoch: Epoch, kept: Epoch | None, metric: Metric) -> bool:
    """Whether an epoch's weights replace the best ones so far."""
    if kept is None or kept.metric is None or epoch.metric is None:
        return True
    gain = -metric.drop_points(kept.metric, epoch.metric)
    # Among trained epochs the later one wins a tie; the input model, epoch 0, must be beaten.
    return gain > 0 or (gain == 0 and kept.epoch > 0)


def epochs_without_gain(history: Sequence[Epoch], metric: Metric) -> list[int]:
    """Count for each epoch how many have passed since the best one; 0 is a new best."""
    best: float | None = None
    counts: list[int] = []
    for epoch in history:
        value = epoch.metric
        improved = best is None or (value is not None and metric.drop_points(best, value) < 0)
        best = value if improved else best
        counts.append(0 if improved else counts[-1] + 1)
    return counts


def is_finished(training: Training, history: Sequence[Epoch], metric: Metric) -> bool:
    """Whether all epochs are trained, or `early_stopping` epochs have brought no gain."""
    trained = sum(1 for epoch in history if epoch.epoch > 0)
    if trained >= training.epochs:
        return True
    if training.early_stopping is None or not history:
        return False
    return epochs_without_gain(history, metric)[-1] >= training.early_stopping


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
