"""What a training changes, step by step: weights, optimizer, loss scale and moving average."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compress.common.forward import flatten_outputs
from compress.training.checkpoint.state_dict import read_
from compress.training.loop.ema import Average
from compress.training.objectives.weight_constraint import free
from compress.training.optim.activation_checkpoint import checkpoint_activations_
from compress.training.optim.optimizer import set_learning_rate_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from compress.data.splits import Batch
    from compress.training.checkpoint.metadata import Progress, Tensors
    from compress.training.config.training import Training
    from compress.training.distributed.base import Strategy
    from compress.training.objectives.objective import LossFunction
    from compress.training.objectives.weight_constraint import Hold

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class TrainState:
    """A module and all that its steps need and change."""

    module: torch.nn.Module
    wrapped: torch.nn.Module
    """The module through which gradients are shared."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: Average | None
    loss: LossFunction
    training: Training
    strategy: Strategy
    device: str
    step_context: Hold
    """What each step of the optimizer is taken in."""

    @classmethod
    def create(
        cls,
        module: torch.nn.Module,
        loss: LossFunction,
        training: Training,
        strategy: Strategy,
        device: str,
        example: Callable[[], Batch],
        step_context: Hold = free,
    ) -> TrainState:
        """Return a learner before its first step; the strategy may shard the module in place."""
        checkpoint_activations_(module, training)
        wrapped = strategy.wrap(module, training, example)
        optimizer = strategy.optimizer(module, training)
        kind = torch.device(device).type
        return cls(
            module=module,
            wrapped=wrapped,
            optimizer=optimizer,
            scaler=torch.amp.GradScaler(kind, enabled=training.precision == "fp16"),
            average=Average(module, training.ema_decay) if training.ema_decay else None,
            loss=loss,
            training=training,
            strategy=strategy,
            device=device,
            step_context=step_context,
        )

    def step(self, batches: Sequence[Batch], rate: float, number: int) -> float:
        """Take one step of the optimizer, and return this rank's mean loss.

        Where the loss is not finite no step is taken: with ``on_nan: skip`` on any rank, and
        buffers are put back.

        Args:
            batches: the parts whose gradients are added up.
            rate: the learning rate.
            number: the step, counted from 0 over the whole training.
        """
        set_learning_rate_(self.optimizer, rate)
        skips = self.training.on_nan == "skip"
        buffers = [b.clone() for b in self.module.buffers()] if skips else []
        self.optimizer.zero_grad()
        value = self.strategy.accumulate_gradients(self, batches)
        if skips and self.strategy.total([not math.isfinite(value)])[0]:
            for buffer, before in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(before)
            value = math.nan
        if math.isfinite(value):
            self._update(number)
        return value

    def tensors(self) -> dict[str, Tensors]:
        """Return this process's part of what a checkpoint holds, not copied."""
        state = self._weights()
        state["optimizer"] = self.strategy.optimizer_tensors(self.module, self.optimizer)
        return state

    def restore(self, checkpoint: Path, progress: Progress) -> None:
        """Put everything where a checkpoint left it."""
        state = self._weights()
        read_(checkpoint, state)
        self.strategy.load_model_(self.module, state["model"])
        self.strategy.load_optimizer_(self.module, self.optimizer, checkpoint)
        self.scaler.load_state_dict(progress.scaler)

    @contextmanager
    def ema_weights(self) -> Iterator[torch.nn.Module]:
        """Give the module with the weights that are evaluated and kept, for a block."""
        with self.average.in_place() if self.average else nullcontext():
            yield self.module

    def _weights(self) -> dict[str, Tensors]:
        state = {"model": self.strategy.model_tensors(self.module)}
        if self.average:
            state["average"] = self.average.tensors()
        return state

    def accumulate_gradients(self, batches: Sequence[Batch]) -> float:
        """Compute the gradients of the parts of a step one by one, and return the mean loss."""
        samples, total = sum(map(len, batches)), 0.0
        for part, batch in enumerate(batches, 1):
            with self.strategy.micro_step(self.wrapped, last=part == len(batches)):
                moved = batch.to(self.device)
                with self.autocast():
                    loss = self.loss(flatten_outputs(self.wrapped(*moved.inputs)), moved)
                weighted = loss * (len(batch) / samples)
                self.strategy.backward(self.wrapped, self.scaler.scale(weighted))
            total += weighted.item()
        return total

    def _update(self, number: int) -> None:
        with self.step_context(number):
            if self.training.clip_norm:
                self.scaler.unscale_(self.optimizer)
                self.strategy.clip_(self.module, self.training.clip_norm)
            self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average:
            self.average.add(number)

    def autocast(self) -> AbstractContextManager[object]:
        """Run forward passes in a block at the precision that the settings name."""
        if self.training.precision == "fp32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, AUTOCAST[self.training.precision])
