"""Zeros that are added during training, step by step."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from compress.pruning.unstructured.masks import unstructured_masks
from compress.training.objectives.weight_constraint import KeepZeros, set_zeros_, weights_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

Schedule: TypeAlias = Literal["linear", "cubic"]


# The repr of a constraint is part of the key by which an interrupted training is resumed: class and
# field names must stay.
@dataclass(frozen=True)
class AddZeros:
    """Adds zeros while weights are trained, the smallest weights first.

    Their share rises with the steps: evenly, or fast at first and slower later, as in Zhu and
    Gupta, "To prune, or not to prune" (2017), equation 1. Zeros stay zero.
    """

    tensors: tuple[str, ...]
    """Names of the weights."""
    amount: float
    """Final share of zeros."""
    whole: bool
    """Whether all weights are ranked together."""
    schedule: Schedule
    until: float
    """Share of the steps after which no zeros are added."""
    updates: int
    """How often zeros are added, evenly spread."""

    @contextmanager
    def around(self, module: nn.Module, step: int, steps: int) -> Iterator[None]:
        """Context around the optimizer's step: restore zeros after it, and add some when due."""
        with KeepZeros(self.tensors).around(module, step, steps):
            yield
        before, after = self._done(step / steps), self._done((step + 1) / steps)
        if after > before:
            weights = weights_of(module, self.tensors)
            amount = self.amount_at(after)
            set_zeros_(weights, unstructured_masks(weights, amount, "l1", self.whole))

    def is_met(self, share: float) -> bool:
        """Whether all zeros have been set after a share of the steps."""
        return self._done(share) == self.updates

    def amount_at(self, done: int) -> float:
        """Return the share of zeros after a number of updates."""
        remaining = 1 - done / self.updates
        return self.amount * (1 - (remaining**3 if self.schedule == "cubic" else remaining))

    def _done(self, share: float) -> int:
        """Return how many updates are due within a share of the steps."""
        # 1e-9: rounding must not miss the last update, due at exactly `until` of the steps.
        return min(self.updates, int(share / self.until * self.updates + 1e-9))
