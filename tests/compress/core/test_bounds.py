"""Bounds hold with their confidence; where outcomes are few, their probabilities are added up."""

import math

import numpy as np
import pytest
from scipy.stats import beta, binom

from compress.core.bounds import (
    mean_bound,
    paired_bound,
    quantile_bound,
    samples_for,
    share_bound,
)


def test_a_share_is_bounded_as_by_clopper_and_pearson() -> None:
    assert share_bound(3, 200, 0.95) == pytest.approx(beta.ppf(0.95, 4, 197))
    assert share_bound(5, 5, 0.95) == 1
    assert share_bound(0, 299, 0.95) <= 0.01 < share_bound(0, 298, 0.95), "rule of three"


@pytest.mark.parametrize("confidence", [0.8, 0.95])
@pytest.mark.parametrize("share", [0.001, 0.02, 0.3])
def test_the_bound_of_a_share_is_broken_as_seldom_as_promised(share, confidence) -> None:
    counts = range(201)
    broken = [binom.pmf(k, 200, share) for k in counts if share_bound(k, 200, confidence) < share]
    assert math.fsum(broken) <= 1 - confidence


def test_how_many_samples_would_show_a_limit() -> None:
    assert samples_for(0.0, 0.01, 0.95) == 299
    needed = samples_for(0.005, 0.01, 0.95)
    assert share_bound(math.ceil(0.005 * needed), needed, 0.95) <= 0.01
    assert share_bound(math.ceil(0.005 * (needed - 1)), needed - 1, 0.95) > 0.01
    assert samples_for(0.01, 0.01, 0.95) is None, "no number of samples"
    assert samples_for(0.0, -0.01, 0.95) is None


def test_a_quantile_is_bounded_by_the_least_order_statistic_that_suffices() -> None:
    values = np.arange(299.0)[::-1]
    assert quantile_bound(values, 0.99, 0.95) == 298
    assert quantile_bound(values[1:], 0.99, 0.95) is None, "too few samples"
    bound = quantile_bound(values, 0.5, 0.95)
    # Below the quantile lie Bin(299, 1/2) samples, and the bound is broken where all these are.
    assert binom.sf(bound, 299, 0.5) <= 0.05 < binom.sf(bound - 1, 299, 0.5)


def test_a_quantile_and_a_share_are_bounded_alike() -> None:
    errors = np.random.default_rng(0).exponential(size=1000)
    bound = quantile_bound(errors, 0.99, 0.95)
    assert share_bound(int((errors > bound).sum()), 1000, 0.95) <= 0.01
    below = np.nextafter(bound, 0)
    assert share_bound(int((errors > below).sum()), 1000, 0.95) > 0.01


@pytest.mark.slow
def test_the_paired_bound_is_broken_as_seldom_as_promised() -> None:
    samples = 14
    outcomes = [(b, c) for b in range(samples + 1) for c in range(samples + 1 - b)]
    bounds = np.array([paired_bound(lost, gained, samples, 0.9) for lost, gained in outcomes])
    worst = 0.0
    for lost in np.arange(0, 1.001, 0.05):
        for gained in np.arange(0, 1.001 - lost, 0.05):
            gained_of_rest = gained / (1 - lost) if lost < 1 else 0.0
            broken = [
                binom.pmf(b, samples, lost) * binom.pmf(c, samples - b, gained_of_rest)
                for (b, c), bound in zip(outcomes, bounds, strict=True)
                if bound < lost - gained - 1e-9
            ]
            worst = max(worst, math.fsum(broken))
    assert 0.06 < worst <= 0.1, "neither broken too often nor much too wide"


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (3, 0), (40, 31), (5, 20)])
def test_the_paired_bound_is_near_the_normal_one_but_above_it(lost, gained) -> None:
    drop, samples = (lost - gained) / 2000, 2000
    spread = math.sqrt((lost + gained) / samples - drop**2) / math.sqrt(samples)
    normal = drop + 1.645 * spread
    bound = paired_bound(lost, gained, samples, 0.95)
    assert normal < bound < normal + max(0.25 * spread, 3.3 / samples)
    assert paired_bound(lost, gained, samples, 0.99) > bound


def test_a_mean_is_bounded_without_its_distribution() -> None:
    generator, broken, bounds = np.random.default_rng(0), 0, []
    for _ in range(300):
        values = generator.binomial(5, 0.1, 200) / 5 - generator.binomial(5, 0.06, 200) / 5
        bounds.append(mean_bound(values, 0.9))
        broken += bounds[-1] < 0.04
    assert broken / 300 <= 0.1
    assert np.mean(bounds) < 0.09, "and not of any size"
