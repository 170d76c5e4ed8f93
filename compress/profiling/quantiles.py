"""Quantiles of measured values and their confidence intervals, for all of the toolkit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
WIDEST = 2.0  # a figure whose interval spans more than this factor is not shown
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776}
"""97.5 % quantile of Student's t by number of values, one more than its degrees of freedom."""


class Interval(NamedTuple):
    """A 95 % confidence interval."""

    low: float
    high: float

    @property
    def unreliable_reason(self) -> str:
        """Why a positive figure with this interval is too uncertain; empty where it is not."""
        if not self.low <= self.high:  # one is NaN
            return "its 95 % interval is not known"
        if self.low > 0 and self.high <= WIDEST * self.low:
            return ""
        return (
            f"its 95 % interval is {self.low:.3g} to {self.high:.3g}, "
            f"wider than a factor of {WIDEST:g}"
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the quantile at a share from 0 (the smallest value) to 1 (the largest)."""
    # Interpolated between neighbouring values (Hyndman and Fan, "Sample quantiles in statistical
    # packages", 1996, definition 7: numpy's default), so that it never lies beyond the smallest or
    # the largest one. ``statistics.quantiles`` extrapolates from few values by default.
    ordered = sorted(values)
    below, part = divmod(share * (len(ordered) - 1), 1)
    low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    # Not low + part * (high - low), which may exceed both by a float's last bit.
    return min(max((1 - part) * low + part * high, low), high)


def median_interval(values: Sequence[float]) -> Interval:
    """Return the confidence interval of a positive population median.

    By order statistics; of three to five values, whose smallest and largest do not enclose the
    median with 95 %, by Student's t of their logarithms, which assumes that these are normal.
    """
    if len(values) not in STUDENT or min(values) <= 0:
        return quantile_interval(values, 0.5)
    logs = [math.log(value) for value in values]
    half = STUDENT[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(*(math.exp(statistics.fmean(logs) + side) for side in (-half, half)))


def quantile_interval(values: Sequence[float], share: float) -> Interval:
    """Return the confidence interval of a positive population quantile, 0 to infinity at most.

    By order statistics, which assume no distribution (Conover, Practical Nonparametric Statistics,
    1999, section 3.2).
    """
    # scipy's `quantile_test` computes the same, but importing it takes as long as a measurement.
    ordered, tail = sorted(values), (1 - CONFIDENCE) / 2
    # The k smallest values all lie below the quantile with the probability of k or more successes.
    below = _binomial_quantile(len(ordered), share, tail)
    above = _binomial_quantile(len(ordered), 1 - share, tail)
    low = ordered[below - 1] if below else 0.0
    high = ordered[-above] if above else math.inf
    return Interval(low, high)


def _binomial_quantile(trials: int, p: float, tail: float) -> int:
    """Return the largest k for which a binomial variable is below k with less than ``tail``."""
    # Starts twelve standard deviations below the mean: probabilities further out are 0 in float64.
    k = max(0, int(trials * p - 12 * math.sqrt(trials * p * (1 - p)) - 1))
    cumulative = 0.0
    while k < trials:
        log_ways = math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1)
        cumulative += math.exp(log_ways + k * math.log(p) + (trials - k) * math.log1p(-p))
        if cumulative >= tail:
            break
        k += 1
    return k
