"""An exponential moving average of the weights."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Average:
    """The average of weights over the steps; buffers are the model's own (Polyak, 1992).

    The decay rises to its value over the first steps, or a short training's average would still be
    made of the weights it began with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        """Begin with the weights that an optimizer holds: these are the shards, where there are."""
        self.weights: list[torch.Tensor] = [
            p for group in optimizer.param_groups for p in group["params"]
        ]
        self.decay = decay
        self.restart()

    def restart(self) -> None:
        """Begin anew with the weights as they are."""
        self.values = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Take in the weights after a step, counted from 0 over the whole training."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for value, weight in zip(self.values, self.weights, strict=True):
            value.lerp_(weight.detach(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averaged weights for a block."""
        own = [weight.detach().clone() for weight in self.weights]
        self._put(self.values)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: list[torch.Tensor]) -> None:
        for weight, value in zip(self.weights, values, strict=True):
            weight.copy_(value)
