"""One-sided confidence bounds that hold for every number of samples and every distribution."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING, Any

from compress.common.lazy_modules import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

CLOPPER_PEARSON = "Clopper–Pearson"
CELLS = 200
"""Parts of the range of the share of changed samples; with more, :func:`paired_bound` is a little
lower: 200 cost it 0.2 % of confidence."""
MOST_SAMPLES = 2**31  # what takes more is as good as at its limit
BET = 0.75  # largest bet; WSR (2024) recommend 1/2 or 3/4


def share_bound(count: int, samples: int, confidence: float) -> float:
    """Return the upper bound of a share of which a sample has `count` (Clopper and Pearson, 1934).

    The share of all inputs is above it with a probability of at most ``1 - confidence``.
    """
    from scipy.special import betaincinv

    return 1.0 if count >= samples else float(betaincinv(count + 1, samples - count, confidence))


def samples_for(rate: float, limit: float, confidence: float) -> int | None:
    """Return the fewest samples whose :func:`share_bound` is at most `limit`, at a rate of counts.

    None where no number of samples will do.
    """

    def suffices(samples: int) -> bool:
        return share_bound(math.ceil(rate * samples - 1e-9), samples, confidence) <= limit

    if rate >= limit or limit <= 0:
        return None
    found = bisect_left(range(MOST_SAMPLES), True, lo=1, key=suffices)
    return found if found < MOST_SAMPLES else None


def score_threshold(
    scores: NDArray[Any], changed: NDArray[np.bool_], limit: float, confidence: float
) -> float | None:
    """Return the least threshold above which so few samples are `changed` that it shows a limit.

    The share of all inputs that are changed and have a score above it exceeds the limit with a
    probability of at most ``1 - confidence``: thresholds are tested from the largest score down to
    the first that :func:`share_bound` does not show (fixed-sequence testing: Angelopoulos et al.,
    "Learn then Test", 2021). As the share only grows on that way, all thresholds between the
    samples' scores may be in the sequence (Bates et al., "Distribution-free, risk-controlling
    prediction sets", 2021). -inf where no score has to be above one, None where none is shown.
    """
    samples = len(scores)
    # What is not a number is above no threshold.
    scores = np.where(np.isnan(scores), -math.inf, scores)
    counted = np.sort(scores[changed])[::-1]
    allowed = bisect_left(
        range(samples + 1), True, key=lambda n: share_bound(n, samples, confidence) > limit
    )
    if not allowed:
        return None
    first = counted[allowed - 1] if len(counted) >= allowed else -math.inf
    if first == -math.inf:
        return -math.inf
    above = scores[scores > first]
    if not len(above):
        return None
    # Halfway: there the last bits of scores, which differ from machine to machine, change nothing.
    return float(first + (above.min() - first) / 2)


def quantile_bound(values: NDArray[np.float64], share: float, confidence: float) -> float | None:
    """Return an upper bound of a quantile: the least order statistic that is one.

    A `share` of all inputs has no larger value, unless with a probability of at most
    ``1 - confidence`` (Wilks, "Determination of sample sizes for setting tolerance limits", 1941).
    None where there are too few samples.
    """
    from scipy.special import bdtr

    count = len(values)
    # The r-th smallest is none where r or more samples are below the quantile.
    holds = bdtr(np.arange(count), count, share) >= confidence
    return float(np.sort(values)[int(holds.argmax())]) if holds.any() else None


def paired_statistic(gained: Any, lost: Any, samples: int, change: float) -> Any:
    """Return Tango's score statistic (1998) of a supposed change of a share, of each element."""
    b = (2 * samples - gained + lost) * change - gained - lost
    c = -lost * change * (1 - change)
    # The likeliest share of samples that are lost, given the change.
    share = (np.sqrt(np.maximum(0.0, b * b - 8 * samples * c)) - b) / (4 * samples)
    variance = samples * (2 * share + change * (1 - change))
    return (gained - lost - samples * change) / np.sqrt(np.maximum(variance, 1e-300))


def paired_bound(lost: int, gained: int, samples: int, confidence: float) -> float:
    """Return the upper bound of the drop of a share, of samples that are right or wrong.

    The exact unconditional test of each supposed drop, inverted: outcomes are ordered by Tango's
    statistic (Sidik, "Exact unconditional tests for testing non-inferiority in matched-pairs
    design", 2003), and their probability is the largest over a confidence set of the share of
    changed samples (Berger and Boos, "P values maximized over a confidence set", 1994). Within each
    of its cells the probability is bounded, not sampled: it falls with the share of lost samples
    and rises with that of gained ones.
    """
    from scipy.special import betainc, betaincinv, gammaln, xlog1py, xlogy

    unsure = 1 - confidence
    beyond = unsure / 50  # spent on the confidence set
    changed = lost + gained
    least = float(betaincinv(changed, samples - changed + 1, beyond / 2)) if changed else 0.0
    most = share_bound(changed, samples, 1 - beyond / 2)

    def probability(drop: float) -> float:
        """Bound the probability of outcomes that speak as much for less than this drop."""
        edges = np.linspace(max(least, abs(drop)), most, CELLS + 1)
        if edges[0] >= most:
            return 0.0
        p_lost = np.maximum((edges[:-1] + drop) / 2, 0.0)[:, None]
        p_gained = np.maximum((edges[1:] - drop) / 2, 0.0)[:, None]
        reach = 7 * math.sqrt(samples * float(p_lost.max())) + 30
        first = max(0, math.floor(samples * float(p_lost.min()) - reach))
        last = min(samples, math.ceil(samples * float(p_lost.max()) + reach))
        losses = np.arange(first, last + 1, dtype=np.float64)
        observed = float(paired_statistic(gained, lost, samples, -drop))
        # The fewest gains, for each number of losses, that speak as much for a smaller drop.
        rest = samples - losses
        low, high = np.full_like(losses, -1.0), rest + 1
        while (high - low > 1).any():
            middle = np.floor((low + high) / 2)
            speaks = paired_statistic(middle, losses, samples, -drop) >= observed - 1e-9
            low, high = np.where(speaks, low, middle), np.where(speaks, middle, high)
        # Made monotone, as the bound within a cell needs: more outcomes only make it larger.
        fewest = np.where(high > rest, np.inf, high)
        fewest = np.minimum.accumulate(fewest[::-1])[::-1]
        log_pmf = gammaln(samples + 1) - gammaln(losses + 1) - gammaln(rest + 1)
        log_pmf = log_pmf + xlogy(losses, p_lost) + xlog1py(rest, -p_lost)
        given = np.minimum(p_gained / (1 - p_lost), 1.0)
        # The probability of so many gains or more, given the losses.
        inside = np.clip(fewest, 1.0, np.maximum(rest, 1.0))
        tail = betainc(inside, np.maximum(rest - inside + 1, 1.0), given)
        tail = np.where(fewest <= 0, 1.0, np.where(fewest > rest, 0.0, tail))
        return float((np.exp(log_pmf) * tail).sum(1).max()) + 1e-9  # what is out of reach

    low, high = (lost - gained) / samples, most
    while high - low > 1e-3 / samples:
        middle = (low + high) / 2
        low, high = (low, middle) if probability(middle) <= unsure - beyond else (middle, high)
    return high


def mean_bound(values: NDArray[np.float64], confidence: float) -> float:
    """Return the upper bound of the mean of numbers between -1 and 1, by betting.

    Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (2024): a
    mean is excluded where bets against it, placed before each sample is seen, win too much.
    """
    scaled = (np.random.default_rng(0).permutation(values) + 1) / 2
    numbers = np.arange(1, len(scaled) + 1)
    means = (0.5 + scaled.cumsum()) / (numbers + 1)
    variances = (0.25 + np.square(scaled - means).cumsum()) / (numbers + 1)
    before = np.concatenate([[0.25], variances[:-1]])
    wins = math.log(1 / (1 - confidence))
    bets = np.minimum(np.sqrt(2 * wins / (len(scaled) * before)), BET)
    low, high = float(scaled.mean()), 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        is_excluded = float(np.log1p(bets * (middle - scaled)).sum()) >= wins
        low, high = (low, middle) if is_excluded else (middle, high)
    return 2 * high - 1
