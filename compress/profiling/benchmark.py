"""Latency of several models measured call by call in turn, and an interval for their ratio."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import TYPE_CHECKING

from compress.common.config import Settings
from compress.common.errors import StageFailed
from compress.profiling.quantiles import Interval, quantile, quantile_interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.data.splits import Splits

    Batches = Sequence[Sequence[torch.Tensor]]

MEASURED_SECONDS = 0.6
PRECISE = 1.04
"""Ratio of an interval's ends at which measuring stops early."""
CHECKED_AFTER = (0.25, 0.25, 0.5)
"""Shares of the seconds, after each of which measuring stops where all intervals are narrow.

Stopping by the width of an interval, not by its place, keeps its coverage as it gets narrow (Chow
and Robbins, "On the Asymptotic Theory of Fixed-Width Sequential Confidence Intervals for the Mean",
1965).
"""
SECOND_TRY = 4
"""How many times longer models are measured once more where an interval is too wide."""
MINIMUM_ROUNDS = 15
MAXIMUM_BLOCKS = 30
FEWEST_BLOCKS = 6
"""Of fewer values the smallest and the largest enclose the median with less than 95 %."""
MOST_BATCHES = 16
MOST_ROWS = 256
"""Samples of `val` in memory during measurement, unless two batches have more."""


class Latency(Settings):
    """Time of one call."""

    batch: int
    """Samples per call."""
    p50: float
    """Median, in milliseconds."""
    p95: float
    """95th percentile, in milliseconds."""
    p50_interval: Interval
    """95 % confidence interval of the median, from the medians of blocks of calls."""
    p95_interval: Interval
    """95 % confidence interval of the 95th percentile, at most the slowest call."""
    outliers: float
    """Fraction of the calls above Tukey's upper fence, 1.5 times the interquartile range above the
    third quartile: other load on the machine."""
    ventiles: tuple[float, ...] = ()
    """Quantiles at 5 %, 10 %, … 95 % of the calls, in milliseconds."""

    @property
    def unreliable_reason(self) -> str:
        """Why the percentiles are too uncertain to be shown; empty where they are not."""
        return self.p50_interval.unreliable_reason or self.p95_interval.unreliable_reason


@dataclass(frozen=True)
class Comparison:
    """Latencies of two models measured in turn in one process."""

    before: Latency
    after: Latency
    ratios: tuple[float, ...]
    """Median of ``before`` over median of ``after``, for each block of consecutive rounds."""

    @property
    def speedup(self) -> float:
        """How many times faster ``after`` is: the median over blocks."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of the speedup, by the order statistics of the blocks."""
        # Of blocks of consecutive rounds, as a machine is slow for a while rather than for a call.
        return quantile_interval(self.ratios, 0.5)

    @property
    def is_precise(self) -> bool:
        """Whether the intervals of the speedup and of both medians are narrow."""
        intervals = (self.interval, self.before.p50_interval, self.after.p50_interval)
        is_narrow = all(i.high <= PRECISE * i.low for i in intervals)
        return is_narrow and not self.unreliable_reason

    @property
    def unreliable_reason(self) -> str:
        """Why some of the figures are too uncertain; empty where none is."""
        estimates = (self.interval, self.before, self.after)
        return next(filter(None, (e.unreliable_reason for e in estimates)), "")

    @property
    def share(self) -> float | None:
        """Time of ``after`` as a share of that of ``before``; None where it is not measurable."""
        return None if self.interval.unreliable_reason else 1 / self.speedup


class MeasuredShare(Settings):
    """Latency of a pruned model beside that of the unpruned one, measured in turn."""

    share: float
    """Time of a call, as a share of the unpruned model's: the median over blocks of calls."""
    unpruned_ms: float
    """Median time of a call of the unpruned model."""
    ms: float
    """Median time of a call."""


@dataclass(frozen=True)
class InterleavedLatencies:
    """Latencies of several models measured in turn in one process."""

    latencies: tuple[Latency, ...]
    medians: tuple[tuple[float, ...], ...]
    """Median of each block of consecutive rounds, by model, in milliseconds."""

    def comparison(self, before: int, after: int) -> Comparison:
        """Compare two of the models."""
        medians = zip(self.medians[before], self.medians[after], strict=True)
        ratios = tuple(a / b for a, b in medians)
        return Comparison(self.latencies[before], self.latencies[after], ratios)

    def fastest(self) -> tuple[int, ...]:
        """Return the model of the least median, and those level with it.

        A model is level if the 95 % interval of its time over the fastest one's includes 1.
        """
        models = range(len(self.latencies))
        first = min(models, key=lambda i: self.latencies[i].p50)
        level = [i for i in models if i != first and self.comparison(i, first).interval.low <= 1]
        return (first, *level)


def unmeasurable(figure: str, doubt: str) -> str:
    """Format the message that a figure cannot be measured now, why, and what helps."""
    return (
        f"{figure} is not measurable on this machine now: {doubt}; run again when it has less to do"
    )


def measured_batches(
    data: Splits | None, signature: Signature, batch: int, seed: int
) -> list[tuple[torch.Tensor, ...]]:
    """Return inputs to measure a model on: samples of `val`, or one seeded batch without data.

    The samples are spread evenly over `val`, and over the batches; they repeat where `val` has too
    few.

    Raises:
        StageFailed: the model's batch is fixed at another size.
    """
    example = signature.example(batch, seed)
    if len(example[0]) != batch:
        raise StageFailed(
            f"batch {batch} cannot be measured: the model's batch is fixed at {len(example[0])}"
        )
    if data is None or "val" not in data.datasets:
        return [example]
    count = min(MOST_BATCHES, max(2, MOST_ROWS // batch))
    samples = len(data.split("val"))  # type: ignore[arg-type]
    spread = [i * samples // (count * batch) for i in range(count * batch)]
    order = [index for first in range(count) for index in spread[first::count]]
    return [samples_of_val.inputs for samples_of_val in data.read("val", order, batch)]


def compare_latency(
    before: Predictor, after: Predictor, batches: Batches, seconds: float = MEASURED_SECONDS
) -> Comparison:
    """Measure two models call by call in turn on the batches, so that both see the same noise.

    Each is measured for so many seconds, after a quarter of that to warm up; for a quarter or a
    half of them where the intervals are narrow then, and for longer where one is too wide.
    """
    return compare_latencies([before, after], batches, seconds).comparison(0, 1)


def compare_latencies(
    predictors: Sequence[Predictor], batches: Batches, seconds: float = MEASURED_SECONDS
) -> InterleavedLatencies:
    """Measure any number of models as :func:`compare_latency` does."""
    rounds = _Rounds(predictors, batches)
    rounds.warm_up(seconds / 4)
    for share in CHECKED_AFTER:
        rounds.measure(share * seconds)
        measured = rounds.results()
        comparisons = [measured.comparison(0, i) for i in range(len(predictors))]
        if all(comparison.is_precise for comparison in comparisons):
            return measured
    if any(comparison.unreliable_reason for comparison in comparisons):
        rounds.measure(SECOND_TRY * seconds)
        measured = rounds.results()
    return measured


@dataclass
class _Rounds:
    """Rounds of calls: in each one every model gets the same batch."""

    predictors: Sequence[Predictor]
    batches: Batches
    times: list[list[float]] = field(default_factory=list)
    """Seconds of each call, by model."""

    def __post_init__(self) -> None:
        self.times = [[] for _ in self.predictors]
        self._next = cycle(self.batches)

    def warm_up(self, seconds: float) -> None:
        """Call without measuring, each shape at least once, as some runtimes compile for it."""
        shapes = {tuple(tuple(x.shape) for x in batch): batch for batch in self.batches}
        for batch in shapes.values():
            for predict in self.predictors:
                predict(*batch)
        deadline = time.perf_counter() + seconds * len(self.predictors)
        for batch in cycle(self.batches):
            for predict in self.predictors:
                predict(*batch)
            if time.perf_counter() >= deadline:
                break

    def measure(self, seconds: float) -> None:
        """Measure further rounds, for so many seconds each model."""
        deadline = time.perf_counter() + seconds * len(self.predictors)
        while len(self.times[0]) < MINIMUM_ROUNDS or time.perf_counter() < deadline:
            batch = next(self._next)
            for predict, own in zip(self.predictors, self.times, strict=True):
                start = time.perf_counter()
                predict(*batch)
                own.append(time.perf_counter() - start)

    def latency(self, index: int) -> Latency:
        """Return the latency of a model."""
        times = [1e3 * taken for taken in self.times[index]]
        ventiles = [quantile(times, i / 20) for i in range(1, 20)]
        first, third = ventiles[4], ventiles[14]
        outliers = sum(taken > third + 1.5 * (third - first) for taken in times)
        low, high = quantile_interval(times, 0.95)
        return Latency(
            batch=len(self.batches[0][0]),
            p50=ventiles[9],
            p95=ventiles[18],
            p50_interval=quantile_interval(self.medians(index), 0.5),
            # With fewer than 72 calls the interval has no upper end.
            p95_interval=Interval(low, min(high, max(times))),
            outliers=outliers / len(times),
            ventiles=tuple(float(f"{value:.4g}") for value in ventiles),
        )

    def medians(self, index: int) -> list[float]:
        """Return a model's median of each block of rounds, in milliseconds."""
        times = self.times[index]
        # With enough rounds each block covers all batches, or blocks would differ where a model
        # takes longer for some inputs than for others.
        is_enough = len(times) >= FEWEST_BLOCKS * len(self.batches)
        unit = len(self.batches) if is_enough else 1
        units = len(times) // unit
        blocks = min(MAXIMUM_BLOCKS, units)
        bounds = [*(unit * (units * i // blocks) for i in range(blocks)), len(times)]
        return [1e3 * statistics.median(times[start:end]) for start, end in pairwise(bounds)]

    def results(self) -> InterleavedLatencies:
        """Return the latency of each model and the medians of its blocks."""
        models = range(len(self.predictors))
        medians = tuple(tuple(self.medians(i)) for i in models)
        return InterleavedLatencies(tuple(map(self.latency, models)), medians)
