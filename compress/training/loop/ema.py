"""An exponential moving average of the weights."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from compress.training.checkpoint.metadata import Tensors


class Average:
    """The average of weights over the steps; buffers are the model's own (Polyak, 1992).

    The decay rises to its value over the first steps, or a short training's average would still be
    made of the weights it began with.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        """Begin with the weights of a module as they are: its shards, where there are."""
        self.module = module
        self.weights = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.values = self._copies()
        self.decay = decay

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Take in the weights after a step, counted from 0 over the whole training."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, weight in self.weights.items():
            self.values[name].lerp_(weight.detach(), 1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the model the averaged weights for a block."""
        own = self._copies()
        self._put(self.values)
        try:
            yield
        finally:
            self._put(own)

    def tensors(self) -> Tensors:
        """Return the averages by all names, of which tied weights have several."""
        kept = {id(weight): self.values[name] for name, weight in self.weights.items()}
        names = self.module.named_parameters(remove_duplicate=False)
        return {name: kept[id(weight)] for name, weight in names if id(weight) in kept}

    def _copies(self) -> Tensors:
        return {name: weight.detach().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def _put(self, values: Tensors) -> None:
        for name, weight in self.weights.items():
            weight.copy_(values[name])
