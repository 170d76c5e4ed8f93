"""The mean loss of an epoch, exact for any number of processes and interruptions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.training.checkpoint.metadata import LossSum
    from compress.training.distributed.base import Strategy

ENOUGH_VALUES = 2
"""Distinct losses that are remembered: two show that the loss varies."""


class LossMeter:
    """Sum of the losses of an epoch's steps.

    Sums are fractions: without rounding their order does not matter, so that a resumed epoch and
    one on several processes report the same loss to the last bit.
    """

    def __init__(self, before: LossSum) -> None:
        """Start from the sum over all processes that a checkpoint within the epoch recorded."""
        self.before = before
        self.total = Fraction(0)
        self.count = 0
        self.values = set[float]()

    def add(self, loss: float) -> None:
        """Add the loss of a step on this process, unless it is not finite."""
        if math.isfinite(loss):
            self.total += Fraction(loss)
            self.count += 1
            if len(self.values) < ENOUGH_VALUES:
                self.values.add(loss)

    def over_all(self, strategy: Strategy) -> LossSum:
        """Sum over all processes; every process calls this and gets the same."""
        parts = strategy.gather_shares((self.total, self.count, self.values)) or []
        total = sum((part[0] for part in parts), Fraction(self.before[0]))
        count = self.before[1] + sum(part[1] for part in parts)
        values = sorted(set(self.before[2]).union(*(part[2] for part in parts)))
        losses: LossSum = strategy.broadcast((str(total), count, tuple(values[:ENOUGH_VALUES])))
        return losses


def is_constant(losses: LossSum) -> bool:
    """Whether several steps had the same loss to the last bit, or any number of them 0."""
    _, count, values = losses
    return len(values) == 1 and (count > 1 or not values[0])
