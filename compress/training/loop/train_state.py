"""`TrainState`: everything that one optimizer step updates, and the step itself."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compress.common.forward import flatten_outputs
from compress.training.checkpoint.state_dict import read_
from compress.training.loop.ema import EMA
from compress.training.objectives.weight_constraint import unconstrained
from compress.training.optim.activation_checkpoint import checkpoint_activations_
from compress.training.optim.optimizer import set_learning_rate_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from compress.data.batch import Batch
    from compress.training.checkpoint.metadata import Tensors, TrainProgress
    from compress.training.config.training import Training
    from compress.training.distributed.base import Strategy
    from compress.training.objectives.objective import LossFunction
    from compress.training.objectives.weight_constraint import StepContext

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class TrainState:
    """Weights, optimizer state, loss scale and moving average of a training."""

    module: torch.nn.Module
    wrapped: torch.nn.Module
    """What forward passes call: the module, or DDP or DeepSpeed around it."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    """Loss scaler of `fp16`; passes everything through at other precisions."""
    ema: EMA | None
    """Exponential moving average of the weights, if the settings ask for one."""
    loss: LossFunction
    training: Training
    strategy: Strategy
    device: str
    step_context: StepContext
    """Entered around clipping and ``optimizer.step()`` (keeps pruned weights at zero, say)."""

    @classmethod
    def create(
        cls,
        module: torch.nn.Module,
        loss: LossFunction,
        training: Training,
        strategy: Strategy,
        device: str,
        example: Callable[[], Batch],
        step_context: StepContext = unconstrained,
    ) -> TrainState:
        """Prepare a module for its first step; the strategy may shard it in place.

        Args:
            module: the whole module.
            loss: the loss function.
            training: the settings.
            strategy: how the processes share the work.
            device: where the module is.
            example: gives a few samples, the same in every process.
            step_context: entered around each optimizer step.
        """
        checkpoint_activations_(module, training)
        wrapped = strategy.wrap(module, training, example)
        optimizer = strategy.optimizer(module, training)
        device_type = torch.device(device).type
        return cls(
            module=module,
            wrapped=wrapped,
            optimizer=optimizer,
            scaler=torch.amp.GradScaler(device_type, enabled=training.precision == "fp16"),
            ema=EMA(module, training.ema_decay) if training.ema_decay else None,
            loss=loss,
            training=training,
            strategy=strategy,
            device=device,
            step_context=step_context,
        )

    def train_step(self, micro_batches: Sequence[Batch], rate: float, step: int) -> float:
        """Take one optimizer step and return the mean loss of this rank's samples.

        A step whose loss is not finite changes nothing: with ``on_nan: skip`` on no rank as soon
        as one rank's loss is not finite, and buffers such as BatchNorm's are restored.

        Args:
            micro_batches: this rank's samples, in the parts whose gradients are accumulated.
            rate: the learning rate, which the schedule gives as a function of the step.
            step: counted from 0 over the whole training.
        """
        training, strategy = self.training, self.strategy
        skips = training.on_nan == "skip"
        buffers = [buffer.clone() for buffer in self.module.buffers()] if skips else []
        set_learning_rate_(self.optimizer, rate)
        self.optimizer.zero_grad()

        if strategy.pipeline is not None:
            # Forward and backward passes of several stages interleave, in the schedule's order.
            (batch,) = micro_batches
            loss = strategy.pipeline.step(batch.to(self.device), self.loss, self.autocast)
        else:
            samples, loss = sum(map(len, micro_batches)), 0.0
            for index, cpu_batch in enumerate(micro_batches, 1):
                # Gradients are all-reduced during the last backward pass, not after each.
                with strategy.gradient_sync(self.wrapped, index == len(micro_batches)):
                    batch = cpu_batch.to(self.device)
                    with self.autocast():
                        mean = self.loss(flatten_outputs(self.wrapped(*batch.inputs)), batch)
                    weighted = mean * (len(batch) / samples)
                    strategy.backward(self.wrapped, self.scaler.scale(weighted))
                loss += weighted.item()
        strategy.reduce_gradients_(self.module)

        if skips and strategy.sum_over_ranks([not math.isfinite(loss)])[0]:
            for buffer, before in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(before)
            return math.nan
        if not math.isfinite(loss):
            return loss
        with self.step_context(step):
            if training.clip_norm:
                self.scaler.unscale_(self.optimizer)
                strategy.clip_grad_norm_(self.module, training.clip_norm)
            self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema:
            self.ema.update_(step)
        return loss

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which forward passes run at the precision of the settings."""
        if self.training.precision == "fp32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, AUTOCAST[self.training.precision])

    @contextmanager
    def ema_weights(self) -> Iterator[torch.nn.Module]:
        """Give the module with the weights to evaluate and keep: the average's, if there is one."""
        with self.ema.applied() if self.ema else nullcontext():
            yield self.module

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
