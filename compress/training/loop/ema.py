"""Exponential moving average of the weights."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from compress.training.checkpoint.metadata import Tensors


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
