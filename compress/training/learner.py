"""What a training changes, step by step: weights, optimizer, loss scale and moving average."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compress.core.eager import flatten_outputs
from compress.training.activations import checkpoint_activations_
from compress.training.average import Average
from compress.training.clipping import clip_norm_
from compress.training.optimizer import set_learning_rate_

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from compress.core.data import Batch
    from compress.training.objective import LossFunction
    from compress.training.parallel import Strategy
    from compress.training.resume import State
    from compress.training.settings import Training

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Learner:
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

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        loss: LossFunction,
        training: Training,
        strategy: Strategy,
        device: str,
    ) -> Learner:
        """Return a learner before its first step; the strategy may shard the module in place."""
        checkpoint_activations_(module, training)
        wrapped = strategy.wrap(module, training)
        optimizer = strategy.optimizer(module, training)
        kind = torch.device(device).type
        return cls(
            module=module,
            wrapped=wrapped,
            optimizer=optimizer,
            scaler=torch.amp.GradScaler(kind, enabled=training.precision == "fp16"),
            average=Average(optimizer, training.ema_decay) if training.ema_decay else None,
            loss=loss,
            training=training,
            strategy=strategy,
            device=device,
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
        value = self._add_up_gradients(batches)
        if skips and self.strategy.total([not math.isfinite(value)])[0]:
            for buffer, before in zip(self.module.buffers(), buffers, strict=True):
                buffer.copy_(before)
            value = math.nan
        if math.isfinite(value):
            self._update(number)
        return value

    def restore(self, state: State) -> None:
        """Put everything where a state on disk left it."""
        if self.average:
            self.strategy.load_weights_(self.module, state.average)
            self.average.restart()
        self.strategy.load_weights_(self.module, state.weights)
        self.strategy.load_optimizer_(self.module, self.optimizer, state.optimizer)
        self.scaler.load_state_dict(state.scaler)

    def save_to(self, state: State) -> None:
        """Enter everything into a state; only rank 0's is whole."""
        state.weights = self.strategy.weights(self.module)
        state.optimizer = self.strategy.optimizer_state(self.module, self.optimizer)
        state.scaler = self.scaler.state_dict()
        if self.average:
            with self.average.in_place():
                state.average = self.strategy.weights(self.module)

    @contextmanager
    def as_kept(self) -> Iterator[torch.nn.Module]:
        """Give the module with the weights that are evaluated and kept, for a block."""
        with self.average.in_place() if self.average else nullcontext():
            yield self.module

    def _add_up_gradients(self, batches: Sequence[Batch]) -> float:
        self.optimizer.zero_grad()
        samples, total = sum(map(len, batches)), 0.0
        for part, batch in enumerate(batches, 1):
            with self.strategy.micro_step(self.wrapped, last=part == len(batches)):
                moved = batch.to(self.device)
                with self._autocast():
                    loss = self.loss(flatten_outputs(self.wrapped(*moved.inputs)), moved)
                weighted = loss * (len(batch) / samples)
                torch.autograd.backward(self.scaler.scale(weighted))
            total += weighted.item()
        return total

    def _update(self, number: int) -> None:
        if self.training.clip_norm:
            self.scaler.unscale_(self.optimizer)
            clip_norm_(self.module.parameters(), self.training.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.average:
            self.average.add(number)

    def _autocast(self) -> AbstractContextManager[object]:
        if self.training.precision == "fp32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, AUTOCAST[self.training.precision])
