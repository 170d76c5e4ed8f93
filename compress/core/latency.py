"""Measuring how long models take, in turn, and how sure the ratio of their times is."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from compress.core.errors import StageFailed
from compress.core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from compress.core.artifact import Predictor
    from compress.core.signature import Signature

MEASURED_SECONDS = 0.6
MINIMUM_ROUNDS = 15
MAXIMUM_BLOCKS = 30
CONFIDENCE = 0.95


class Latency(Settings):
    """Time of one call."""

    batch: int
    """Samples per call."""
    p50: float
    """Median, in milliseconds."""
    p95: float
    """95th percentile, in milliseconds."""
    outliers: float
    """Fraction of the calls that took longer than Tukey's upper fence, 1.5 times the interquartile
    range above the third quartile: what else the machine did."""
    ventiles: tuple[float, ...] = ()
    """Below these stayed 5 %, 10 %, … 95 % of the calls, in milliseconds."""


class Interval(NamedTuple):
    """Where a figure lies, with the confidence of 95 %."""

    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Latencies of two models measured in turn in one process."""

    before: Latency
    after: Latency
    ratios: tuple[float, ...]
    """Median of ``before`` over median of ``after``, in blocks of consecutive rounds."""

    @property
    def speedup(self) -> float:
        """How many times faster ``after`` is: the median over the blocks."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> Interval:
        """Where the speedup lies, by the order of the blocks alone.

        Blocks of consecutive rounds are compared, as a machine is slow for a while rather than for
        one call. The interval of a median by order statistics assumes no distribution (Conover,
        Practical Nonparametric Statistics, 1999, section 3.2).
        """
        return _around_the_median(self.ratios)


def one_batch(signature: Signature, batch: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Return seeded inputs of so many samples.

    Raises:
        StageFailed: the model takes another number.
    """
    inputs = signature.example(batch, seed)
    if len(inputs[0]) != batch:
        raise StageFailed(
            f"batch {batch} cannot be measured: the model's batch is fixed at {len(inputs[0])}"
        )
    return inputs


def compare_latency(
    before: Predictor,
    after: Predictor,
    inputs: Sequence[torch.Tensor],
    seconds: float = MEASURED_SECONDS,
) -> Comparison:
    """Measure two models call by call in turn, so that both see the same noise.

    Args:
        before: the model compared with.
        after: the candidate.
        inputs: one batch, the same for both.
        seconds: how long each is measured, after a quarter of that to warm up.
    """
    slow, fast = _rounds([before, after], inputs, seconds)
    rows = len(inputs[0])
    return Comparison(_latency(slow, rows), _latency(fast, rows), _block_ratios(slow, fast))


def latencies(
    predictors: Sequence[Predictor],
    inputs: Sequence[torch.Tensor],
    seconds: float = MEASURED_SECONDS,
) -> list[Latency]:
    """Measure any number of models call by call in turn, so that all see the same noise.

    Args:
        predictors: the models.
        inputs: one batch, the same for all.
        seconds: how long each is measured, after a quarter of that to warm up.
    """
    return [_latency(times, len(inputs[0])) for times in _rounds(predictors, inputs, seconds)]


def _rounds(
    predictors: Sequence[Predictor], inputs: Sequence[torch.Tensor], seconds: float
) -> list[list[float]]:
    for predict in predictors:
        predict(*inputs)  # what compiles at its first call does so before the clock runs
    deadline = time.perf_counter() + seconds / 4 * len(predictors)
    while True:
        for predict in predictors:
            predict(*inputs)
        if time.perf_counter() >= deadline:
            break
    times: list[list[float]] = [[] for _ in predictors]
    deadline = time.perf_counter() + seconds * len(predictors)
    while len(times[0]) < MINIMUM_ROUNDS or time.perf_counter() < deadline:
        for predict, own in zip(predictors, times, strict=True):
            start = time.perf_counter()
            predict(*inputs)
            own.append(time.perf_counter() - start)
    return times


def _latency(seconds: Sequence[float], batch: int) -> Latency:
    ventiles = statistics.quantiles(seconds, n=20)
    first, median, third = statistics.quantiles(seconds, n=4)
    late = sum(taken > third + 1.5 * (third - first) for taken in seconds)
    return Latency(
        batch=batch,
        p50=median * 1e3,
        p95=ventiles[-1] * 1e3,
        outliers=late / len(seconds),
        ventiles=tuple(float(f"{value * 1e3:.4g}") for value in ventiles),
    )


def _around_the_median(values: Sequence[float]) -> Interval:
    """Return the interval of scipy's `quantile_test`, whose import took as long as measuring."""
    count, ordered = len(values), sorted(values)
    tail = (1 - CONFIDENCE) / 2 * 2**count
    rank = sum(ways < tail for ways in accumulate(math.comb(count, k) for k in range(count)))
    if not rank:  # too few values to be that sure
        return Interval(math.nan, math.nan)
    return Interval(ordered[rank - 1], ordered[-rank])


def _block_ratios(before: Sequence[float], after: Sequence[float]) -> tuple[float, ...]:
    blocks = min(MAXIMUM_BLOCKS, len(before))
    ends = [len(before) * i // blocks for i in range(blocks + 1)]
    return tuple(
        statistics.median(before[start:end]) / statistics.median(after[start:end])
        for start, end in pairwise(ends)
    )
