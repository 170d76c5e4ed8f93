"""Latency of several models measured in turn, and an interval for their ratio."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from compress.common.config import Settings
from compress.common.counts import count, counting_paused
from compress.common.errors import StageFailed
from compress.common.malloc import memory_as_deployed, trim_memory
from compress.profiling.quantiles import Interval, median_interval, quantile, quantile_interval

if TYPE_CHECKING:
    import torch

    from compress.common.forward import Predictor
    from compress.common.signature import Signature
    from compress.data.splits import Splits

    Batches = Sequence[Sequence[torch.Tensor]]
    Opener = Callable[[], AbstractContextManager[Predictor]]
    """Loads a model, for a ``with`` block."""

T = TypeVar("T")

STAT = Path("/proc/stat")
HELPED, CLOCK_SECONDS = 0.05, 5e-6
"""How much longer than the calling thread the whole process may compute in a call of one thread, as
a share and as the time of reading clocks."""
SPARE = 0.15
"""Processors that other processes may take of those that calls need: the system's own work."""
MEASURED_SECONDS = 0.6
PRECISE = 1.04
"""Ratio of an interval's ends at which measuring stops early.

Stopping by the width of an interval, not by its place, keeps its coverage as it gets narrow (Chow
and Robbins, "On the Asymptotic Theory of Fixed-Width Sequential Confidence Intervals for the Mean",
1965).
"""
SECOND_TRY = 4  # how many times longer models are measured once more where an interval is too wide
FEWEST_BLOCKS = 8  # their smallest and largest values enclose the median with 99 %
TURN_SECONDS = 0.01
"""Of one model's calls, before another one's: so that a small model's weights are in the
processor's caches, as they are where it is served alone."""
FEWEST_LONG_BLOCKS = 4
"""Where a call takes longer than a turn, and all have one shape: it spans so many slices of the
scheduler and so many operators that its time is a mean already, whose noise is nearly normal.

Each of two models is first in half of them. Student's factor for their mean is 1.6 standard
deviations; for three it would be 2.5, so that the fourth call pays for itself. Six blocks of three
models (ResNet-18, calls of 10 to 56 ms beside other load) held the ratio of 300 blocks more often
than the usual number, as their interval is wider.
"""
DEAR_SECONDS = 0.1
"""Of a call, from which on a block has one round, and batches of the median size alone."""
OPENING_SECONDS = MEASURED_SECONDS
"""For which a model is opened anew and warmed up at most, as long as it is called.

Where it lies in memory matters to small ones; large ones take longer to open, and lie in so many
pages that it averages out.
"""
WARM_UP_CALLS = 2
"""After a model was opened, for each shape: TorchScript optimizes a model in its second call."""
MOST_BATCHES = 16
MOST_ROWS = 256  # samples of `val` in memory during measurement, unless two batches have more
MIXED_ROWS, MIXED_BYTES = 2048, 2**28
"""Most samples, and bytes of them, where the time of a call depends on the sample."""
MIXED_CALLS = 32
"""Fewest batches of a turn there; each is called :data:`MIXED_REPEATS` times, the median counts."""
MIXED_REPEATS = 3


class CallTimer:
    """Times calls, and knows whether other processes made them longer.

    What one thread computes takes that thread's CPU time, which stands still while another process
    has the processor, so that a short disturbance changes nothing. Where several threads, another
    process or a GPU compute, CPU time is no latency: these calls take their wall time.

    If other processes left too few processors free all the while, the times say nothing: CPU time
    grows too, by shared caches and memory, and not for every model alike (an eager ResNet-20 took
    1.4 times as long beside eight busy processes on two processors, its ONNX file 1.1 times).
    """

    def __init__(self, threads: int) -> None:
        """Begin to count what other processes take, beside calls of so many CPU threads."""
        self.threads = threads
        torch: Any = sys.modules.get("torch")
        # For a GPU the calling thread may wait without sleeping.
        has_gpu = torch is not None and torch.cuda.is_available()
        self._computes_alone = threads == 1 and not has_gpu
        self._processors = os.sched_getaffinity(0)
        self._start = self._counters()

    def call(self, function: Callable[[], T]) -> tuple[T, float]:
        """Call a function, and return its result and the seconds that it took."""
        slept = getrusage(RUSAGE_THREAD).ru_nvcsw
        wall, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
        result = function()
        thread = time.thread_time() - thread
        process = time.process_time() - process
        wall = time.perf_counter() - wall
        slept = getrusage(RUSAGE_THREAD).ru_nvcsw - slept
        is_helped = process - thread > HELPED * thread + CLOCK_SECONDS
        if self._computes_alone and not is_helped and not slept:
            return result, thread
        return result, wall

    def _doubt(self) -> str:
        """Return why the times say nothing; empty where they do."""
        wall, busy, own = (b - a for a, b in zip(self._start, self._counters(), strict=True))
        others, processors = max(0.0, busy - own) / max(wall, 1e-9), len(self._processors)
        if others + min(self.threads, processors) <= processors + SPARE:
            return ""
        return f"other processes took {others:.2g} of {processors} processors"

    doubt = property(_doubt)
    """Why the times say nothing; empty where they do."""

    def _counters(self) -> tuple[float, float, float]:
        """Return wall time, and CPU time of all processes and of this one, in seconds."""
        names, ticks = {f"cpu{number}" for number in self._processors}, 0
        try:
            lines = STAT.read_text().splitlines()
        except OSError:
            lines = []
        for name, *counts in filter(None, map(str.split, lines)):
            if name in names:
                user, nice, system, _idle, _waiting, *rest = map(int, counts[:8])
                ticks += user + nice + system + sum(rest)
        return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


class CallTimes(Settings):
    """Times of one call beside its median and 95th percentile, in milliseconds."""

    batch: int
    """Samples per call."""
    outliers: float
    """Fraction of the calls above Tukey's upper fence, 1.5 times the interquartile range above the
    third quartile."""
    p99: float | None = None
    """99th percentile of the calls; None in measurements of older versions, as the next three."""
    p99_interval: Interval | None = None
    mean: float | None = None
    """Mean over the batches, of each the median of its calls in a turn; calls of a cascade take
    different times, and it is compared by this."""
    mean_interval: Interval | None = None
    """95 % confidence interval of it, from the means of blocks of calls."""
    ventiles: tuple[float, ...] = ()
    """Quantiles at 5 %, 10 %, … 95 % of the calls; empty in reports of older versions."""
    calls: int = 0
    """How many calls were timed; 0 in measurements of older versions."""


class Latency(CallTimes):
    """Time of one call."""

    p50: float
    """Median over blocks of calls."""
    p95: float
    """95th percentile of the calls."""
    p50_interval: Interval
    """95 % confidence interval of the median, from the medians of blocks of calls."""
    p95_interval: Interval
    """95 % confidence interval of the 95th percentile, at most the slowest call."""
    disturbed: str = ""
    """Why none of it can be trusted, such as other processes; empty where it can."""

    def doubt_of(self, figure: Literal["p50", "p95", "p99", "mean"]) -> str:
        """Return why a figure is too uncertain to be shown; empty where it is not."""
        interval: Interval | None = getattr(self, f"{figure}_interval")
        return self.disturbed or ("" if interval is None else interval.unreliable_reason)


@dataclass(frozen=True)
class Comparison:
    """Latencies of two models measured in turn in one process."""

    before: Latency
    after: Latency
    ratios: tuple[float, ...]
    """Time of ``before`` over that of ``after``, for each block of consecutive rounds."""

    @property
    def speedup(self) -> float:
        """How many times faster ``after`` is: the median over blocks."""
        return statistics.median(self.ratios)

    @property
    def interval(self) -> Interval:
        """95 % confidence interval of the speedup, from its values in the blocks."""
        # Of blocks of consecutive rounds, as a machine is slow for a while rather than for a call.
        return median_interval(self.ratios)

    @property
    def speedup_doubt(self) -> str:
        """Why the speedup is too uncertain to be shown; empty where it is not."""
        return self.before.disturbed or self.interval.unreliable_reason

    @property
    def unreliable_reason(self) -> str:
        """Why some of the figures are too uncertain; empty where none is."""
        latencies = (self.before, self.after)
        doubts = (
            doubt for one in latencies for doubt in (one.doubt_of("p50"), one.doubt_of("p95"))
        )
        return self.speedup_doubt or next(filter(None, doubts), "")

    @property
    def share(self) -> float | None:
        """Time of ``after`` as a share of that of ``before``; None where it is not measurable."""
        return None if self.speedup_doubt else 1 / self.speedup


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
    """Milliseconds of a call in each block of consecutive rounds, by model: the mean call where
    calls take different times."""

    def typical_ms(self, model: int) -> float:
        """Return the milliseconds of a model's call, by which models are compared."""
        return statistics.median(self.medians[model])

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
        first = min(models, key=self.typical_ms)
        level = [i for i in models if i != first and self.comparison(i, first).interval.low <= 1]
        return (first, *level)


class NotMeasurable(StageFailed):
    """A figure cannot be measured now, as the machine has too much else to do; later it may be."""


def unmeasurable(figure: str, doubt: str) -> str:
    """Format the message that a figure cannot be measured now, why, and what helps."""
    return (
        f"{figure} is not measurable on this machine now: {doubt}; run again when it has less to do"
    )


def measured_batches(
    data: Splits | None, signature: Signature, batch: int, seed: int, *, mixed: bool = False
) -> list[tuple[torch.Tensor, ...]]:
    """Return inputs to measure a model on: samples of `val`, or one seeded batch without data.

    The samples are spread evenly over `val`, and over the batches; they repeat where `val` has too
    few. They are more where they are `mixed`: some take a model longer than others.

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
    if mixed:
        bytes_of_row = sum(x.nbytes for x in example) // batch
        rows = min(MIXED_ROWS, samples, MIXED_BYTES // max(1, bytes_of_row))
        count = max(count, rows // batch)
    spread = [i * samples // (count * batch) for i in range(count * batch)]
    order = [index for first in range(count) for index in spread[first::count]]
    return [samples_of_val.inputs for samples_of_val in data.read("val", order, batch)]


def compare_latency(
    before: Opener,
    after: Opener,
    batches: Batches,
    seconds: float = MEASURED_SECONDS,
    *,
    threads: int,
) -> Comparison:
    """Measure two models in turn on the batches, so that both see the same noise.

    One model with itself is measured once. See :func:`compare_latencies`.
    """
    models = [before] if before is after else [before, after]
    measured = compare_latencies(models, batches, seconds, threads=threads)
    return measured.comparison(0, len(models) - 1)


def compare_latencies(
    models: Sequence[Opener],
    batches: Batches,
    seconds: float = MEASURED_SECONDS,
    *,
    threads: int,
    mixed: bool = False,
    opening_order: Sequence[int] = (),
) -> InterleavedLatencies:
    """Measure models in turn on the batches, in blocks before each of which they are opened anew.

    Models are opened and called in another order each time, in which each of them stands at each
    place equally often. Two copies of one model differ by several percent for as long as they stay
    open, by where their weights lie in memory; opened anew they lie elsewhere, so that the blocks'
    interval holds that, too. With an `opening_order` they are opened in that order each time, which
    it then holds less of.

    Each model is measured for so many ``seconds``, and for longer where an interval is too wide, or
    the blocks are too few. Calls that take long are fewer, see :data:`FEWEST_LONG_BLOCKS`, and from
    :data:`DEAR_SECONDS` on all have the median size of the batches, as each size is called twice
    before it is measured.

    Where samples take a model longer than others (`mixed`), each call of a turn has other ones, the
    same for every model, and means are compared: a median would leave out the calls that take
    longer.
    """
    with memory_as_deployed(), ExitStack() as stack:
        blocks = _Blocks(
            models, batches, seconds, threads, stack, mixed=mixed, opening_order=opening_order
        )
        blocks.measure()
    count("forwards.timed.calls", sum(map(len, blocks.times)) + blocks.warm_up_calls)
    return blocks.results()


class _Blocks:
    """Blocks of two rounds: in each round every model has a turn of calls with the same batch.

    Of one round where calls take long.
    """

    def __init__(
        self,
        models: Sequence[Opener],
        batches: Batches,
        seconds: float,
        threads: int,
        opened: ExitStack,
        *,
        mixed: bool,
        opening_order: Sequence[int],
    ) -> None:
        self.models, self.batches, self.seconds, self.opened = models, batches, seconds, opened
        self.mixed, self.opening_order = mixed, opening_order
        self.timer = CallTimer(threads)
        self.times: list[list[float]] = [[] for _ in models]  # seconds of each call, by model
        self.medians: list[list[float]] = [[] for _ in models]
        """Milliseconds of a call in each block, by model: the mean of its turns' medians."""
        self.means: list[list[float]] = [[] for _ in models]  # the same of its turns' means
        self.warm_up_calls = 0
        self._predictors: dict[int, Predictor] = {}
        self._warm: set[tuple[int, ...]] = set()  # shapes that the opened models were called with
        self._calls: list[int] = []  # calls of a turn, by model
        self._opening_seconds = 0.0
        self._rounds, self._fewest = 2, FEWEST_BLOCKS  # rounds of a block, and the fewest blocks

    def measure(self) -> None:
        """Measure blocks until the intervals are narrow, or the time is over."""
        count, spent, number = len(self.models), 0.0, 0
        self._open(range(count))
        self._choose_counts()
        while True:
            order = [(number + i) % count for i in range(count)]
            if number:
                self._open(order)
            turns = [self._turn(self._rounds * number + i) for i in range(self._rounds)]
            start = time.perf_counter()
            self._warm_up(turns)
            self._measure_block(order, turns)
            spent += time.perf_counter() - start
            number += 1
            if number < self._fewest or number % count:
                continue
            # Each model has stood at each place equally often.
            results = self.results()
            comparisons = [results.comparison(0, i) for i in range(count)]
            is_doubtful = any(c.unreliable_reason for c in comparisons)
            intervals = [c.interval for c in comparisons]
            intervals += [latency.p50_interval for latency in results.latencies]
            if not is_doubtful and all(i.high <= PRECISE * i.low for i in intervals):
                break
            # Other processes that have not ended by then will not end soon.
            longer = 1 if self.timer.doubt else SECOND_TRY
            tries = 1 + longer if is_doubtful else 1
            if spent >= tries * self.seconds * count:
                break

    def _open(self, order: Sequence[int]) -> None:
        """Open the models anew, unless that takes too long."""
        start = time.perf_counter()
        if self._opening_seconds > OPENING_SECONDS * len(self.models):
            return
        self._predictors.clear()
        self._warm.clear()
        self.opened.close()
        for i in self.opening_order or order:
            self._predictors[i] = self.opened.enter_context(self.models[i]())
            trim_memory()  # a runtime that read a whole file has freed it again
        self._opening_seconds += time.perf_counter() - start

    def _turn(self, number: int) -> Batches:
        """Return the batch of a turn's calls, or where they are mixed that of each call."""
        count = max(MIXED_CALLS, max(self._calls) // MIXED_REPEATS) if self.mixed else 1
        return [self.batches[(count * number + i) % len(self.batches)] for i in range(count)]

    @counting_paused()
    def _warm_up(self, turns: Sequence[Batches]) -> None:
        """Call without measuring, as some runtimes compile for each shape."""
        start = time.perf_counter()
        for batch in chain.from_iterable(turns):
            shapes = tuple(size for x in batch for size in (-1, *x.shape))
            if shapes not in self._warm:
                for predict in self._predictors.values():
                    for _ in range(WARM_UP_CALLS):
                        predict(*batch)
                self.warm_up_calls += WARM_UP_CALLS * len(self._predictors)
                self._warm.add(shapes)
        self._opening_seconds += time.perf_counter() - start

    @counting_paused()
    def _choose_counts(self) -> None:
        """Choose from the time of first calls how many calls and rounds follow."""
        sizes = [sum(x.numel() for x in batch) for batch in self.batches]
        typical = self.batches[sizes.index(statistics.median_low(sizes))]
        self._warm_up([[typical]])
        turn = min(TURN_SECONDS, self.seconds / (2 * FEWEST_BLOCKS))
        longest = 0.0
        for i in range(len(self.models)):
            shortest, tried, start = math.inf, 0, time.perf_counter()
            while True:
                tried += 1
                shortest = min(shortest, self.timer.call(partial(self._predictors[i], *typical))[1])
                # One call may have been disturbed; beyond that, a longer one is dear to repeat.
                is_long = shortest > (TURN_SECONDS if tried > 1 else DEAR_SECONDS)
                if is_long or time.perf_counter() > start + self.seconds / 4:
                    break
            self.warm_up_calls += tried
            self._calls.append(max(1, round(turn / max(shortest, 1e-6))))
            longest = max(longest, shortest)
        shapes = [x.shape for x in typical]
        alike = [batch for batch in self.batches if [x.shape for x in batch] == shapes]
        if longest > DEAR_SECONDS:
            self._rounds, self.batches = 1, alike
        if longest > TURN_SECONDS and len(alike) == len(self.batches):
            count = len(self.models)
            self._fewest = -(-FEWEST_LONG_BLOCKS // count) * count

    @counting_paused()
    def _measure_block(self, order: Sequence[int], turns: Sequence[Batches]) -> None:
        """Measure a round, and a second one in reverse order."""
        block: list[list[tuple[float, float]]] = [[] for _ in self.models]
        for batches, places in zip(turns, (order, reversed(order)), strict=False):
            for i in places:
                calls = [partial(self._predictors[i], *batch) for batch in batches]
                count = len(calls)
                calls *= MIXED_REPEATS if self.mixed else self._calls[i]
                # A first call finds another model's weights in the caches. Of mixed ones some more,
                # as the rare calls that take longer need memory that no call had yet.
                for call in calls[:MIXED_CALLS] if self.mixed else calls[1:2]:
                    call()
                times = [self.timer.call(call)[1] for call in calls]
                self.times[i] += times
                # Of each batch the median, or a single disturbed call would move the mean.
                by_batch = [statistics.median(times[first::count]) for first in range(count)]
                block[i].append((statistics.median(times), statistics.fmean(by_batch)))
        for i, found in enumerate(block):
            for own, figures in zip(
                (self.medians, self.means), zip(*found, strict=True), strict=True
            ):
                own[i].append(1e3 * statistics.fmean(figures))

    def _latency(self, index: int) -> Latency:
        times = [1e3 * taken for taken in self.times[index]]
        ventiles = [quantile(times, i / 20) for i in range(1, 20)]
        first, third = ventiles[4], ventiles[14]
        outliers = sum(taken > third + 1.5 * (third - first) for taken in times)
        # With fewer than 72 calls the interval of p95 has no upper end.
        p95, p99 = (
            Interval(low, min(high, max(times)))
            for low, high in (quantile_interval(times, share) for share in (0.95, 0.99))
        )
        return Latency(
            batch=len(self.batches[0][0]),
            p50=statistics.median(self.medians[index]),
            p95=ventiles[18],
            p50_interval=median_interval(self.medians[index]),
            p95_interval=p95,
            p99=quantile(times, 0.99),
            p99_interval=p99,
            mean=statistics.fmean(self.means[index]),
            mean_interval=median_interval(self.means[index]),
            outliers=outliers / len(times),
            ventiles=tuple(float(f"{value:.4g}") for value in ventiles),
            calls=len(times),
            disturbed=self.timer.doubt,
        )

    def results(self) -> InterleavedLatencies:
        """Return the latency of each model and its medians."""
        return InterleavedLatencies(
            tuple(map(self._latency, range(len(self.models)))),
            tuple(map(tuple, self.means if self.mixed else self.medians)),
        )
