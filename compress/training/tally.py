"""Tally: the mean of an epoch's losses, the same however the epoch was cut and its steps shared."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compress.training.strategy import Strategy


class Tally:
    """Losses of the steps of an epoch; sums are exact, so that their order does not matter."""

    def __init__(self, before: tuple[str, int]) -> None:
        """Begin with what all processes had counted when a checkpoint was written."""
        self.before = Fraction(before[0]), before[1]
        self.total = Fraction(0)
        self.count = 0

    def add(self, loss: float) -> None:
        """Count the loss of a step on this process, unless it is not finite."""
        if math.isfinite(loss):
            self.total += Fraction(loss)
            self.count += 1

    def over_all(self, strategy: Strategy) -> tuple[str, int]:
        """Return the sum, as a fraction, and the count over all processes, on each of them."""
        parts = strategy.gather((self.total, self.count)) or []
        total = sum((part[0] for part in parts), self.before[0])
        count = self.before[1] + sum(part[1] for part in parts)
        shared: tuple[str, int] = strategy.share((str(total), count))
        return shared
