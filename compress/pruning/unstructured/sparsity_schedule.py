"""Zeros in a training: those that stay, and those that are added step by step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from compress.pruning.unstructured.masks import unstructured

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

Schedule: TypeAlias = Literal["linear", "cubic"]


@dataclass(frozen=True)
class KeepZeros:
    """Zeros of some weights stay zero: their gradients are left out, and nothing moves them."""

    tensors: tuple[str, ...]
    """Names of the weights."""

    @contextmanager
    def around(self, module: nn.Module, step: int, steps: int) -> Iterator[None]:
        """Take the optimizer's step without the gradients of zeros, and put them back."""
        weights = _weights(module, self.tensors)
        zeros = {name: weight == 0 for name, weight in weights.items()}
        for name, weight in weights.items():
            if weight.grad is not None:
                weight.grad.masked_fill_(zeros[name], 0)
        yield
        set_zeros_(weights, zeros)

    def is_met(self, share: float) -> bool:
        """Always: the zeros are there from the beginning."""
        return True


@dataclass(frozen=True)
class AddZeros:
    """Zeros become more while weights are trained, the smallest weights first.

    Their share rises with the steps: evenly, or fast at first and slower later, as in Zhu and
    Gupta, "To prune, or not to prune" (2017), equation 1. What is zero stays zero.
    """

    tensors: tuple[str, ...]
    """Names of the weights."""
    amount: float
    """Share of zeros in the end."""
    whole: bool
    """Whether all weights are ranked together."""
    schedule: Schedule
    until: float
    """Share of the steps after which no zeros are added."""
    updates: int
    """How often zeros are added, evenly spread."""

    @contextmanager
    def around(self, module: nn.Module, step: int, steps: int) -> Iterator[None]:
        """Take the optimizer's step, put zeros back, and add some where it is time."""
        with KeepZeros(self.tensors).around(module, step, steps):
            yield
        before, after = self._done(step / steps), self._done((step + 1) / steps)
        if after > before:
            weights = _weights(module, self.tensors)
            set_zeros_(weights, unstructured(weights, self.amount_at(after), "l1", self.whole))

    def is_met(self, share: float) -> bool:
        """Whether all zeros have been made."""
        return self._done(share) == self.updates

    def amount_at(self, done: int) -> float:
        """Return the share of zeros after so many of the updates."""
        left = 1 - done / self.updates
        return self.amount * (1 - (left**3 if self.schedule == "cubic" else left))

    def _done(self, share: float) -> int:
        """Return how many of the updates lie within a share of the steps."""
        # Steps are whole numbers: 0.75 of them must not be missed by rounding.
        return min(self.updates, int(share / self.until * self.updates + 1e-9))


@torch.no_grad()
def set_zeros_(weights: Mapping[str, torch.Tensor], zeros: Mapping[str, torch.Tensor]) -> None:
    """Set entries of weights to zero, in place."""
    for name, where in zeros.items():
        weights[name].masked_fill_(where, 0)


def _weights(module: nn.Module, tensors: tuple[str, ...]) -> dict[str, nn.Parameter]:
    parameters = dict(module.named_parameters())
    return {name: parameters[name] for name in tensors}
