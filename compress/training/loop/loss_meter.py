"""Tally: the mean of an epoch's losses, the same however the epoch was cut and its steps shared."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from compress.training.distributed.base import Strategy


Losses: TypeAlias = tuple[str, int, tuple[float, ...]]
"""The exact sum of losses, a fraction; their count; two that differ, or the one that all are."""
DIFFERENT = 2


class LossMeter:
    """Losses of the steps of an epoch; sums are exact, so that their order does not matter."""

    def __init__(self, before: Losses) -> None:
        """Begin with what all processes had counted when a checkpoint was written."""
        self.before = before
        self.total = Fraction(0)
        self.count = 0
        self.values = set[float]()
        """The first two losses that differ."""

    def add(self, loss: float) -> None:
        """Count the loss of a step on this process, unless it is not finite."""
        if math.isfinite(loss):
            self.total += Fraction(loss)
            self.count += 1
            if len(self.values) < DIFFERENT:
                self.values.add(loss)

    def over_all(self, strategy: Strategy) -> Losses:
        """Return the sum, the count and some values over all processes, on each of them."""
        parts = strategy.gather((self.total, self.count, self.values)) or []
        total = sum((part[0] for part in parts), Fraction(self.before[0]))
        count = self.before[1] + sum(part[1] for part in parts)
        values = sorted(set(self.before[2]).union(*(part[2] for part in parts)))
        shared: Losses = strategy.share((str(total), count, tuple(values[:DIFFERENT])))
        return shared


def is_constant(losses: Losses) -> bool:
    """Whether several steps had the same loss to the last bit, or any number of them 0."""
    _, count, values = losses
    return len(values) == 1 and (count > 1 or not values[0])
