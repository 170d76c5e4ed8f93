"""A training as a value, what its optimizer steps update, and how that is saved and restored."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from compress.common.errors import StageFailed
from compress.common.forward import flatten_outputs
from compress.common.process import derive_seed, reseed
from compress.training.checkpoint import (
    FOLDER,
    PARTIAL,
    TrainProgress,
    commit,
    create_partial,
    newest_intact,
    one_line_errors,
    read_,
    read_progress,
    rotate,
)
from compress.training.distributed.base import PATIENCE, Strategy, steps_per_epoch
from compress.training.objectives.objective import Constraint, LossFunction, Objective, label_count
from compress.training.optim.transformer_blocks import checkpoint_activations_, use_channels_last_

if TYPE_CHECKING:
    from torch import nn

    from compress.core.metrics import Metric
    from compress.data.batch import Batch
    from compress.data.splits import Splits
    from compress.training.checkpoint import Tensors
    from compress.training.config.training import Checkpoints, Training


@dataclass(frozen=True)
class Job:
    """A training run. Models are named by their directories, so that it pickles in a few bytes."""

    start: Path
    """Directory of the eager model whose weights are trained."""
    training: Training
    objective: Objective
    data: Splits
    metric: Metric
    reference: Path | None
    """Directory of the model that the metric `fidelity` compares with."""
    device: str
    threads: int
    """CPU threads of each process."""
    seed: int
    folder: Path
    """Directory of the checkpoints, one after every epoch."""
    accept_start: bool
    """Whether the untrained input model counts as epoch 0 and is kept if no epoch beats it."""
    code_folder: Path | None = None
    """Directory of the user's code, such as a scheduler's; None if there is no pipeline file."""
    constraint: Constraint | None = None
    """What the weights must satisfy after every step, such as a sparsity mask."""
    profiles: Path | None = None
    """Directory for traces and memory snapshots."""
    record_every: int | None = None
    """Steps between those that are reported; None if only epochs are."""
    flops_per_unit: float | None = None
    """Floating-point operations of forward and backward pass for a token, or for a sample of a
    model without tokens; None if the MFU is not reported."""
    fixed_batch: int | None = None
    """The only number of samples that the model is called with; None for any number."""
    trusted: str | None = None
    """Name of the checkpoint whose hashes the parent process has just verified."""

    @property
    def train_samples(self) -> int:
        """Number of samples in `train`; of a stream without `__len__` those that are held."""
        stream = self.data.stream
        if stream is not None and stream.samples is not None:
            return stream.samples
        return len(self.data.split("train"))  # type: ignore[arg-type]  # Splits admits sized datasets only

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        of_pass = steps_per_epoch(self.train_samples, self.training.batch_size)
        return self.training.steps_per_epoch or of_pass

    @property
    def total_steps(self) -> int:
        """Optimizer steps in all epochs."""
        return self.training.epochs * self.steps_per_epoch

    def example_batch(self) -> Batch:
        """Read a few training samples, the same ones in every process."""
        # A pipeline needs a sample for each micro-batch.
        pipeline = self.training.parallel.pipeline
        samples = min(self.train_samples, pipeline.microbatches if pipeline else 2)
        batch = next(iter(self.data.read("train", range(samples), samples, self.seed)))
        return batch.to(self.device)


class EMA:
    """Average of the weights over the steps (Polyak, 1992); buffers are not averaged."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        """Start from a module's present weights, or from its shards if it is sharded."""
        self.module = module
        self.weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.averages = self._copy_weights()
        self.decay = decay

    @torch.no_grad()
    def update_(self, step: int) -> None:
        """Average in the weights after a step, counted from 0 over the whole training."""
        # The decay rises over the first steps, as TensorFlow's: with a constant one, the average
        # after a short training would still consist of the initial weights.
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, weight in self.weights.items():
            self.averages[name].lerp_(weight.detach(), 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the module's weights by their averages inside the block."""
        trained = self._copy_weights()
        self._load_weights_(self.averages)
        try:
            yield
        finally:
            self._load_weights_(trained)

    def tensors(self) -> Tensors:
        """Return the averages under all of the weights' names; tied weights have several."""
        by_weight = {id(weight): self.averages[name] for name, weight in self.weights.items()}
        names = self.module.named_parameters(remove_duplicate=False)
        return {name: by_weight[id(weight)] for name, weight in names if id(weight) in by_weight}

    def _copy_weights(self) -> Tensors:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def _load_weights_(self, values: Tensors) -> None:
        for name, weight in self.weights.items():
            weight.copy_(values[name])


AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST_LOSS_SCALE = 1.0
"""In `fp16` a training fails where steps still overflow below it: it starts at 65,536, and halves
with each step that overflows."""


class TrainState:
    """Weights, optimizer state, loss scale and moving average of a training."""

    def __init__(
        self,
        module: torch.nn.Module,
        loss: LossFunction,
        training: Training,
        strategy: Strategy,
        device: str,
        example: Callable[[], Batch],
        step_context: Callable[[int], AbstractContextManager[None]] | None = None,
        seed: int = 0,
    ) -> None:
        """Prepare a module for its first step; the strategy may shard it in place."""
        self.seed = seed
        if training.precision == "bf16-true":
            round_weights_(module)
        self.module, self.loss, self.training = module, loss, training
        self.strategy, self.device = strategy, device
        self.autocast = partial(autocast, training, device)
        self.step_context = step_context
        """Of a step's number: entered around clipping and ``optimizer.step()`` (keeps pruned
        weights at zero, say)."""
        strategy.synchronize_batch_norm_(module)
        if training.channels_last:
            use_channels_last_(module)
        # Before sharding and DDP, whose hooks must not see the second forward pass.
        checkpoint_activations_(module, training)
        self.wrapped = strategy.wrap(module, training, example)
        """What forward passes call: the module, or DDP or DeepSpeed around it."""
        # After wrapping: the optimizer and the average refer to the shards.
        self.optimizer = strategy.optimizer(module, training)
        self.scaler = strategy.loss_scaler(training, device)
        self.loss_scale = 1.0  # by which the loss of the last step was multiplied
        self.ema = EMA(module, training.ema_decay) if training.ema_decay else None
        self.gradient_norm: torch.Tensor | None = None
        """Global norm of the last step's gradient before clipping; None if it was not computed."""

    def train_step(
        self, micro_batches: Sequence[Batch], step: int, *, measure_norm: bool = False
    ) -> float:
        """Take one optimizer step and return this rank's loss; its mean over ranks is the step's.

        A step whose loss, or gradient where its norm is known, is not finite changes nothing: with
        ``on_nan: skip`` on no rank as soon as one rank's loss is not finite, and buffers such as
        BatchNorm's are restored; with fp16 it lowers the loss scale. Steps are counted from 0 over
        the whole training.
        ``measure_norm`` computes the gradient norm even where `clip_norm` does not need it, as is
        done in a single process, where that takes no message.
        """
        training, strategy, scales = self.training, self.strategy, self.training.precision == "fp16"
        self.gradient_norm = None
        skips = training.on_nan == "skip"
        buffers = [buffer.clone() for buffer in self.module.buffers()] if skips or scales else []

        def restore_buffers() -> None:
            for buffer, before in zip(self.module.buffers(), buffers, strict=bool(buffers)):
                buffer.copy_(before)

        self.optimizer.zero_grad()

        if strategy.pipeline is not None:
            # Forward and backward passes of several stages interleave, in the schedule's order.
            (batch,) = micro_batches
            parts = strategy.pipeline.split(batch.to(self.device))
            loss = strategy.pipeline.step(parts, self._shares(parts)(), self.loss, self.autocast)
        else:
            # Summed over ranks while the first forward pass is computed.
            wait_for_shares, losses = self._shares(micro_batches), []
            for index, cpu_batch in enumerate(micro_batches):
                # Gradients are all-reduced during the last backward pass, not after each.
                with strategy.gradient_sync(self.wrapped, index + 1 == len(micro_batches)):
                    batch = cpu_batch.to(self.device)
                    with self.autocast():
                        mean = self.loss(flatten_outputs(self.wrapped(*batch.inputs)), batch)
                    if index == 0:
                        shares = wait_for_shares()
                    weighted = mean * shares[index]
                    strategy.backward(self.wrapped, self.scaler.scale(weighted))
                losses.append(weighted.detach())
            # Read once a step: until then a CUDA device computes without waiting for this process.
            loss = sum(torch.stack(losses).tolist())
        strategy.reduce_gradients_(self.module)
        self.loss_scale = self.scaler.get_scale()

        is_finite = math.isfinite(loss)
        if skips and strategy.sum_over_ranks([not is_finite])[0]:
            is_finite, loss = False, math.nan
        if not is_finite:
            restore_buffers()
            if not scales:
                return loss
            # The scaler finds that gradients are not finite, skips the step and lowers the scale.
        with self.step_context(step) if self.step_context else nullcontext():
            # Of a single process it takes no message; in fp16 the scaler finds what is not finite.
            if training.clip_norm or measure_norm or (strategy.processes == 1 and not scales):
                self.scaler.unscale_(self.optimizer)  # the limit is for gradients as they are
                self.gradient_norm = strategy.clip_grad_norm_(self.module, training.clip_norm)
            # One of all ranks, so that each of them leaves the step out.
            if not scales and self.gradient_norm is not None and not self.gradient_norm.isfinite():
                restore_buffers()
                return math.nan
            if training.precision == "bf16-true":
                # Weights are rounded by random numbers, which must be the same in all processes.
                reseed(derive_seed(self.seed, step), self.device)
            self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema:
            self.ema.update_(step)
        return loss

    def _shares(
        self, micro_batches: Sequence[Batch]
    ) -> Callable[[], Sequence[float] | torch.Tensor]:
        """Return a function that waits for what the mean loss of each micro-batch is multiplied by.

        So that the average of the gradients over ranks is the gradient of the mean over all labels
        of the step: the micro-batch's share of these labels, times the number of ranks.
        """
        counts = [label_count(self.loss, batch) for batch in micro_batches]
        known = [count for count in counts if count is not None]
        if len(known) < len(counts):
            # All ranks have equally many samples.
            samples = sum(map(len, micro_batches))
            return lambda: [len(batch) / samples for batch in micro_batches]
        # Tensors, because reading them would wait for the device.
        own = torch.stack(known).double()
        total = own.sum()
        wait = self.strategy.all_reduce_(total)

        def shares() -> torch.Tensor:
            wait()
            # If all labels of a step are ignored, its losses are 0 already.
            return (own * self.strategy.ranks / total.where(total > 0, 1)).float()

        return shares

    def tensors(self) -> dict[str, Tensors]:
        """Return this process's part of a checkpoint's tensors, not copied."""
        tensors = self._weights()
        tensors["optimizer"] = self.strategy.optimizer_tensors(self.module, self.optimizer)
        return tensors

    def restore(self, checkpoint: Path, progress: TrainProgress) -> None:
        """Load weights, average, optimizer state and loss scale from a checkpoint, in place."""
        weights = self._weights()
        read_(checkpoint, weights)
        self.strategy.load_model_(self.module, weights["model"])
        self.strategy.load_optimizer_(self.module, self.optimizer, checkpoint)
        self.scaler.load_state_dict(progress.scaler)

    def _weights(self) -> dict[str, Tensors]:
        weights = {"model": self.strategy.model_tensors(self.module)}
        if self.ema:
            weights["average"] = self.ema.tensors()
        return weights


class CheckpointManager:
    """The checkpoints of a training, of which one may be in the course of being written."""

    def __init__(self, folder: Path, settings: Checkpoints, strategy: Strategy) -> None:
        """Remove incomplete checkpoints; every process calls this."""
        self.folder = folder
        self.settings = settings
        self.strategy = strategy
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[None] | None = None
        """Done when this process has written its part of the present checkpoint."""
        self.on_written: Callable[[], None] | None = None
        # A group of its own: its collectives run beside those of the training steps, and would
        # be matched with them in the default group.
        self.group = (
            dist.new_group(backend="gloo", timeout=PATIENCE) if dist.is_initialized() else None
        )
        if strategy.is_main:
            for unfinished in list((folder / FOLDER).glob(f"step-*{PARTIAL}")):
                shutil.rmtree(unfinished)
        strategy.barrier()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until the present checkpoint is written, even if training was interrupted."""
        self.thread.shutdown()
        if self.pending is not None and not self.pending.exception():
            self.notify_if_written()

    def save(
        self,
        step: int,
        progress: TrainProgress,
        state: TrainState,
        on_written: Callable[[], None] | None = None,
    ) -> None:
        """Write the state after a step, counted over the whole training, at once or in a thread.

        The tensors are copied before this returns. Once all is on disk, the main process calls
        ``on_written``, in this thread: see :meth:`notify_if_written`. Raises StageFailed if this
        checkpoint or the one before cannot be written.
        """
        self.wait()  # one at a time: they share the group
        partial = create_partial(self.folder, step)
        self.strategy.save_local(partial)
        # Buffers such as BatchNorm's follow each process's own batches; rank 0's are saved.
        self.strategy.broadcast_buffers_(state.module)
        with one_line_errors(f"checkpoint {partial} cannot be written"):
            written: Any = async_save(
                state.tensors(),
                checkpoint_id=partial,
                process_group=self.group,
                no_dist=self.group is None,
            )
        self.pending = self.thread.submit(self._write, partial, progress, written)
        self.on_written = on_written if self.strategy.is_main else None
        if not self.settings.asynchronous:
            self.wait()

    def notify_if_written(self) -> None:
        """Call ``on_written`` of the present checkpoint if it is on disk; for after each step."""
        if self.on_written is not None and self.pending is not None and self.pending.done():
            self.pending.result()
            on_written, self.on_written = self.on_written, None
            on_written()

    def resume(self, state: TrainState, trusted: str | None) -> TrainProgress | None:
        """Restore the newest intact checkpoint in place; return None if there is none."""
        newest = newest_intact(self.folder, trusted) if self.strategy.is_main else None
        checkpoint: Path | None = self.strategy.broadcast(newest)
        if checkpoint is None:
            return None
        progress, layout = read_progress(checkpoint), state.training.parallel.layout
        before = progress.layouts[-1]
        if ("deepspeed" in before) != ("deepspeed" in layout):
            raise StageFailed(
                f"checkpoint {checkpoint} was written with {before} and cannot be resumed with "
                f"{layout}, because DeepSpeed stores the optimizer's state in a format of its own; "
                f"resume with the settings it was written with, or remove {checkpoint.parent} to "
                "train anew"
            )
        state.restore(checkpoint, progress)
        # What each process saves for itself, such as gradient residuals, fits as many processes.
        if before == layout:
            self.strategy.load_local(checkpoint)
        return progress

    def wait(self) -> None:
        """Wait until all processes have written the present checkpoint, or raise why not."""
        if self.pending is not None:
            self.pending.result()
            self.notify_if_written()
            self.pending = None
        self.strategy.barrier()

    def _write(self, partial: Path, progress: TrainProgress, written: Future[Any]) -> None:
        """Commit the checkpoint; rank 0's future is done when all processes have written."""
        with one_line_errors(f"checkpoint {partial} cannot be written"):
            written.result()
        if self.strategy.is_main:
            commit(partial, progress)
            rotate(self.folder, self.settings.keep)


def autocast(training: Training, device: str) -> AbstractContextManager[object]:
    """Return torch's autocast at the precision of the settings, if they ask for one."""
    if training.precision not in AUTOCAST:
        return nullcontext()
    return torch.autocast(torch.device(device).type, AUTOCAST[training.precision])


def round_weights_(module: torch.nn.Module) -> None:
    """Round weights and buffers to bf16, in place; inputs and outputs of the module stay fp32.

    BatchNorm keeps fp32, as its averages change little from step to step; torch's kernels take
    bf16 inputs beside.
    """
    for part in module.modules():
        if not isinstance(part, _BatchNorm):
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                tensor.data = _cast(tensor.data, torch.bfloat16)
    module.register_forward_pre_hook(
        lambda _, inputs: tree_map(partial(_cast, dtype=torch.bfloat16), inputs)
    )
    module.register_forward_hook(
        lambda _, inputs, outputs: tree_map(partial(_cast, dtype=torch.float32), outputs)
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value
