"""Quantiles and their intervals, held against numpy, and against tables that others computed."""

import math
import random
import statistics

import numpy as np
import pytest

from compress.profiling.quantiles import Interval, median_interval, quantile, quantile_interval


@pytest.mark.parametrize("count", [1, 2, 3, 7, 18, 19, 20, 101])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.25, 0.5, 0.95, 0.99, 1.0])
def test_a_quantile_equals_numpys_within_the_measured_range(count: int, share: float) -> None:
    values = [random.Random(count).lognormvariate(0, 3) for _ in range(count)]
    found = quantile(values, share)
    assert found == pytest.approx(float(np.quantile(values, share)))
    assert min(values) <= found <= max(values)
    assert quantile(values, 0.5) == pytest.approx(statistics.median(values))


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(6, 1, 6), (8, 1, 8), (10, 2, 9), (15, 4, 12), (20, 6, 15), (25, 8, 18), (30, 10, 21)],
)
def test_the_interval_of_a_median_is_that_of_the_tables(count: int, low: int, high: int) -> None:
    """At 95 % and not 90 %, which for 10, 20, 25 and 30 values leaves out one more on each side.

    Conover, Practical Nonparametric Statistics, table A3: the binomial distribution.
    """
    assert quantile_interval(range(1, count + 1), 0.5) == (low, high)


@pytest.mark.parametrize("count", [1, 5])
def test_too_few_values_have_an_unbounded_interval(count: int) -> None:
    interval = quantile_interval([1.0] * count, 0.5)
    assert interval == (0, math.inf)
    assert interval.unreliable_reason


def test_a_high_quantile_of_few_values_has_no_upper_end() -> None:
    """0.95 ** 71 is above 2.5 %, and 0.95 ** 72 below."""
    assert 0.95**72 < 0.025 < 0.95**71
    assert quantile_interval(range(1, 72), 0.95).high == math.inf
    assert quantile_interval(range(1, 73), 0.95).high == 72
    assert quantile_interval(range(1, 101), 0.95).low == 90


def test_many_values_do_not_overflow() -> None:
    low, high = quantile_interval(range(100_001), 0.95)
    assert low == pytest.approx(95_000 - 135, abs=3)  # 1.96 deviations of 69
    assert high == pytest.approx(95_000 + 135, abs=3)


@pytest.mark.parametrize(
    "interval",
    [(0, 1.86), (1, 2.001), (0, 0), (-1, 1), (math.nan, math.nan), (1, math.nan), (1, math.inf)],
)
def test_wide_intervals_are_unreliable(interval: tuple[float, float]) -> None:
    assert Interval(*interval).unreliable_reason


def test_narrow_intervals_are_reliable() -> None:
    assert not Interval(1, 2).unreliable_reason
    assert not Interval(0.001, 0.0011).unreliable_reason


def test_few_values_enclose_their_median_as_often_as_many() -> None:
    generator = np.random.default_rng(0)
    for count in (3, 4, 5, 8):
        hits = 0
        for _ in range(2000):
            low, high = median_interval(np.exp(generator.normal(0, 0.02, count)).tolist())
            hits += low <= 1 <= high
        assert hits / 2000 > 0.94, count
