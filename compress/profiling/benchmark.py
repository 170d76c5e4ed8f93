"""Measuring how long models take, in turn, and how sure the ratio of their times is."""

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
    from collections.abc import Iterator, Sequence

    import torch

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.data.splits import Splits

    Batches = Sequence[Sequence[torch.Tensor]]

MEASURED_SECONDS = 0.6
SECOND_TRY = 4
"""How many times longer models are measured once more where their figures are not sure."""
MINIMUM_ROUNDS = 15
MAXIMUM_BLOCKS = 30
FEWEST_BLOCKS = 6
"""Of fewer values no interval holds the median with 95 %."""
MOST_BATCHES = 16
MOST_ROWS = 256
"""Of `val` that are held in memory to be measured on, as long as two batches are."""


class Latency(Settings):
    """Time of one call."""

    batch: int
    """Samples per call."""
    p50: float
    """Median, in milliseconds."""
    p95: float
    """95th percentile, in milliseconds."""
    p50_interval: Interval
    """Where the median lies with a confidence of 95 %, by the medians of blocks of calls."""
    p95_interval: Interval
    """Where the 95th percentile lies, as far as the calls were so fast or slow."""
    outliers: float
    """Fraction of the calls that took longer than Tukey's upper fence, 1.5 times the interquartile
    range above the third quartile: what else the machine did."""
    ventiles: tuple[float, ...] = ()
    """Below these stayed 5 %, 10 %, … 95 % of the calls, in milliseconds."""

    @property
    def doubt(self) -> str:
        """Why the percentiles say too little to be shown; empty where they do not."""
        return self.p50_interval.doubt or self.p95_interval.doubt


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
        one call.
        """
        return quantile_interval(self.ratios, 0.5)

    @property
    def share(self) -> float | None:
        """Time of ``after`` as a share of that of ``before``; None where it is not measurable."""
        return None if self.interval.doubt else 1 / self.speedup


def unmeasurable(figure: str, doubt: str) -> str:
    """Return in words that a figure is not known, why, and what helps."""
    return (
        f"{figure} is not measurable on this machine now: {doubt}; run again when it has less to do"
    )


def measured_batches(
    data: Splits | None, signature: Signature, batch: int, seed: int
) -> list[tuple[torch.Tensor, ...]]:
    """Return inputs to measure a model on: samples of `val`, or one seeded batch without data.

    The samples are spread evenly over `val`, and over the batches. Where `val` has fewer than are
    needed they come again.

    Args:
        data: the data, if any.
        signature: the model's interface.
        batch: samples per call.
        seed: of the inputs without data.

    Raises:
        StageFailed: the model takes another number of samples.
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
    return [found.inputs for found in data.read("val", order, batch)]


def compare_latency(
    before: Predictor,
    after: Predictor,
    batches: Batches,
    seconds: float = MEASURED_SECONDS,
) -> Comparison:
    """Measure two models call by call in turn, so that both see the same noise.

    Where the figures are not sure they are measured for longer, once.

    Args:
        before: the model compared with.
        after: the candidate.
        batches: what both are asked, one after the other and from the beginning again.
        seconds: how long each is measured, after a quarter of that to warm up.
    """
    rounds = _Rounds([before, after], batches)
    rounds.warm_up(seconds / 4)
    rounds.measure(seconds)
    compared = _compared(rounds)
    if compared.interval.doubt or compared.before.doubt or compared.after.doubt:
        rounds.measure(SECOND_TRY * seconds)
        compared = _compared(rounds)
    return compared


def latencies(
    predictors: Sequence[Predictor], batches: Batches, seconds: float = MEASURED_SECONDS
) -> list[Latency]:
    """Measure any number of models call by call in turn, so that all see the same noise.

    Args:
        predictors: the models.
        batches: what all are asked, one after the other and from the beginning again.
        seconds: how long each is measured, after a quarter of that to warm up.
    """
    rounds = _Rounds(predictors, batches)
    rounds.warm_up(seconds / 4)
    rounds.measure(seconds)
    return [rounds.latency(index) for index in range(len(predictors))]


@dataclass
class _Rounds:
    """Rounds of calls: in each one every model is asked the same."""

    predictors: Sequence[Predictor]
    batches: Batches
    times: list[list[float]] = field(default_factory=list)
    """Seconds of each call, by model."""

    def __post_init__(self) -> None:
        self.times = [[] for _ in self.predictors]
        self._next = cycle(self.batches)

    def warm_up(self, seconds: float) -> None:
        """Ask without taking times, each shape at least once: some models compile for it."""
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
        """Add rounds for so many seconds each model."""
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
        late = sum(taken > third + 1.5 * (third - first) for taken in times)
        low, high = quantile_interval(times, 0.95)
        return Latency(
            batch=len(self.batches[0][0]),
            p50=ventiles[9],
            p95=ventiles[18],
            p50_interval=quantile_interval(self.medians(index), 0.5),
            # Of fewer than 72 calls none is surely slower than 95 % of all.
            p95_interval=Interval(low, min(high, max(times))),
            outliers=late / len(times),
            ventiles=tuple(float(f"{value:.4g}") for value in ventiles),
        )

    def medians(self, index: int) -> list[float]:
        """Return a model's median of each block of rounds, in milliseconds."""
        times = self.times[index]
        return [1e3 * statistics.median(times[start:end]) for start, end in self._blocks()]

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield where blocks of rounds begin and end; each asks all batches, if there are enough.

        Or blocks would differ where a model takes longer for some inputs than for others.
        """
        unit = len(self.batches)
        if len(self.times[0]) < FEWEST_BLOCKS * unit:
            unit = 1
        units = len(self.times[0]) // unit
        blocks = min(MAXIMUM_BLOCKS, units)
        ends = [unit * (units * i // blocks) for i in range(blocks)]
        yield from pairwise([*ends, len(self.times[0])])


def _compared(rounds: _Rounds) -> Comparison:
    before, after = rounds.medians(0), rounds.medians(1)
    ratios = tuple(slow / fast for slow, fast in zip(before, after, strict=True))
    return Comparison(rounds.latency(0), rounds.latency(1), ratios)
