"""Quantiles of what was measured, and how sure they are; the one definition for all of the toolkit.

A quantile is interpolated between neighbouring values (Hyndman and Fan, "Sample quantiles in
statistical packages", 1996, definition 7: numpy's default), so that it never lies beyond the
smallest or the largest one. ``statistics.quantiles`` extrapolates from few values by default.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIDENCE = 0.95
WIDEST = 2.0
"""A figure whose interval spans more than this factor is not shown, as it says too little."""


class Interval(NamedTuple):
    """Where a figure lies, with the confidence of 95 %."""

    low: float
    high: float

    @property
    def unreliable_reason(self) -> str:
        """Why a positive figure with this interval says too little; empty where it does not."""
        if not self.low <= self.high:  # one is NaN
            return "its 95 % interval is not known"
        if self.low > 0 and self.high <= WIDEST * self.low:
            return ""
        return (
            f"its 95 % interval is {self.low:.3g} to {self.high:.3g}, "
            f"wider than a factor of {WIDEST:g}"
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies, interpolated between neighbours.

    Args:
        values: at least one.
        share: from 0 (the smallest value) to 1 (the largest).
    """
    ordered = sorted(values)
    below, part = divmod(share * (len(ordered) - 1), 1)
    low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    # Not low + part * (high - low), which may exceed both by a float's last bit.
    return min(max((1 - part) * low + part * high, low), high)


def quantile_interval(values: Sequence[float], share: float) -> Interval:
    """Return the interval in which a quantile of the population lies, from 0 to infinity at most.

    By order statistics, which assume no distribution (Conover, Practical Nonparametric Statistics,
    1999, section 3.2). scipy's `quantile_test` gives the same; its import took as long as
    measuring.

    Args:
        values: positive ones.
        share: between 0 and 1; 0.5 for the median.
    """
    ordered, tail = sorted(values), (1 - CONFIDENCE) / 2
    # The k smallest values all lie below the quantile with the probability of k or more successes.
    below = _at_most(len(ordered), share, tail)
    above = _at_most(len(ordered), 1 - share, tail)
    low = ordered[below - 1] if below else 0.0
    high = ordered[-above] if above else math.inf
    return Interval(low, high)


def _at_most(count: int, share: float, tail: float) -> int:
    """Return how many successes of a binomial distribution have P(X < successes) below a tail."""
    # Probabilities far from the mean vanish in floats; twelve deviations leave nothing out.
    start = max(0, int(count * share - 12 * math.sqrt(count * share * (1 - share)) - 1))
    total, successes = 0.0, start
    while successes < count:
        total += _probability(count, successes, share)
        if total >= tail:
            break
        successes += 1
    return successes


def _probability(count: int, successes: int, share: float) -> float:
    ways = math.lgamma(count + 1) - math.lgamma(successes + 1) - math.lgamma(count - successes + 1)
    odds = successes * math.log(share) + (count - successes) * math.log1p(-share)
    return math.exp(ways + odds)
