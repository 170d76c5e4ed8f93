import itertools
import math
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import MaxLatency, MaxMemory, MinSpeedup
from compress.data.splits import Splits
from compress.profiling import benchmark, quantiles
from compress.profiling.benchmark import (
    Comparison,
    Latency,
    compare_latencies,
    compare_latency,
    measured_batches,
)
from compress.profiling.quantiles import Interval

Opener = partial
ROWS = [(torch.zeros(3, 1),)]


class Clock:
    """Time that passes where a model is called, on the wall and on the thread's CPU."""

    def __init__(self) -> None:
        self.wall = self.cpu = self.helpers = 0.0
        self.others = 0.0
        """CPU seconds of other processes."""
        self.sleeps = 0

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.cpu

    def process_time(self) -> float:
        return self.cpu + self.helpers

    def usage(self, who: int) -> SimpleNamespace:
        return SimpleNamespace(ru_nvcsw=self.sleeps)

    def read_text(self) -> str:
        """Return /proc/stat of a machine with two processors."""
        ticks = int(100 * (self.others + self.process_time()))
        return f"cpu0 {ticks} 0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0 0 0\ncpu7 10{ticks} 0 0 0 0"

    def pass_time(self, seconds: float) -> None:
        self.wall += seconds
        self.cpu += seconds

    def model(self, *times: float) -> Opener:
        """Return what opens a model whose calls take these times, in 1/1024 s, over and over."""
        turns = itertools.cycle(times)

        def predict(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.pass_time(next(turns) / 1024)  # exact in binary
            return (x,)

        return partial(nullcontext, predict)


@pytest.fixture(autouse=True)
def opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open models again and again, as for users."""
    monkeypatch.setattr(benchmark, "OPENING_SECONDS", benchmark.MEASURED_SECONDS)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(benchmark, "time", clock)
    monkeypatch.setattr(benchmark.CallTimer, "doubt", property(benchmark.CallTimer._doubt))
    monkeypatch.setattr(benchmark, "STAT", clock)
    monkeypatch.setattr(benchmark, "getrusage", clock.usage)
    monkeypatch.setattr(benchmark.os, "sched_getaffinity", lambda _: {0, 1})
    return clock


compare = partial(compare_latency, threads=1)


def test_every_model_stands_at_each_place_equally_often() -> None:
    asked: list[str] = []
    opened: list[str] = []

    @contextmanager
    def model(name: str):
        opened.append(name)
        yield lambda x: asked.append(name) or (x,)

    compare_latencies([partial(model, name) for name in "abc"], ROWS, 1e-9, threads=1)
    del asked[6:9]  # one call of each, by which it is decided how many make a turn
    blocks = len(opened) // 3
    assert blocks >= 8
    assert blocks % 3 == 0
    for place in range(3):
        assert {opened[place::3].count(name) for name in "abc"} == {blocks // 3}
    # Two calls of each to warm up, and two rounds: the second one in reverse.
    for block in range(blocks):
        calls = asked[12 * block : 12 * block + 12]
        order = opened[3 * block : 3 * block + 3]
        assert calls[6:] == [*order, *reversed(order)]


def test_models_are_opened_in_a_given_order_and_called_in_turn_all_the_same() -> None:
    asked: list[str] = []
    opened: list[str] = []

    @contextmanager
    def model(name: str):
        opened.append(name)
        yield lambda x: asked.append(name) or (x,)

    models = [partial(model, name) for name in "abc"]
    compare_latencies(models, ROWS, 1e-9, threads=1, opening_order=(2, 1, 0))
    blocks = len(opened) // 3
    assert opened == [*"cba"] * blocks
    del asked[6:9]  # one call of each, by which it is decided how many make a turn
    first = [asked[12 * block + 6] for block in range(blocks)]
    assert {first.count(name) for name in "abc"} == {blocks // 3}


def test_a_model_that_opens_slowly_is_not_opened_again(clock: Clock) -> None:
    opened: list[float] = []

    @contextmanager
    def slow():
        opened.append(clock.wall)
        clock.pass_time(9.0)
        yield lambda x: clock.pass_time(2**-6) or (x,)

    compare(slow, clock.model(1.0), ROWS)
    assert len(opened) == 1


def test_a_preempted_call_takes_its_cpu_time(clock: Clock) -> None:
    def preempted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        clock.wall += 4 / 1024
        clock.others += 8 / 1024
        clock.pass_time(20 / 1024)
        return (x,)

    compared = compare(partial(nullcontext, preempted), clock.model(1.0), ROWS)
    assert compared.speedup == pytest.approx(20)
    assert not compared.unreliable_reason


@pytest.mark.parametrize(
    ("threads", "others", "doubt"),
    [(2, 1.5, "other processes took 1.5 of 2 processors"), (2, 0.05, ""), (1, 0.9, "")],
)
def test_calls_that_others_help_with_are_measured_while_processors_are_free(
    threads: int, others: float, doubt: str, clock: Clock
) -> None:
    def helped(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        clock.pass_time(1 / 1024)
        clock.helpers += (threads == 2) / 1024
        clock.sleeps += threads == 1  # it waits for another process
        clock.others += others / 1024
        return (x,)

    model = partial(nullcontext, helped)
    compared = compare_latency(model, model, ROWS, threads=threads)
    assert compared.speedup_doubt == doubt
    assert compared.unreliable_reason == doubt
    assert (compared.share is None) is bool(doubt)
    assert compared.after.p50 == pytest.approx(1000 / 1024)


def test_a_machine_that_is_busy_all_the_while_is_named(clock: Clock) -> None:
    def alone(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        clock.pass_time(1 / 1024)
        clock.others += 2 / 1024
        return (x,)

    compared = compare(*[partial(nullcontext, alone)] * 2, ROWS)
    assert compared.speedup_doubt == "other processes took 2 of 2 processors"
    assert compared.share is None


def test_a_slow_period_changes_neither_the_ratio_nor_its_interval(clock: Clock) -> None:
    disturbed = clock.model(*[0.5] * 40, *[5.0] * 4)
    compared = compare(clock.model(1.0), disturbed, ROWS, 3.0)
    assert compared.speedup == pytest.approx(2)
    assert compared.interval == pytest.approx((2, 2))
    assert compared.before.outliers == 0
    assert compared.after.outliers == pytest.approx(4 / 44, abs=0.02)
    assert compared.after.p95 == pytest.approx(5000 / 1024)


def test_the_first_call_after_another_model_is_not_counted(clock: Clock) -> None:
    last: list[str] = []

    def model(name: str, warm: float) -> Opener:
        def predict(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            is_cold = last[-1:] != [name]
            last.append(name)
            clock.pass_time((10 if is_cold else 1) * warm / 1024)
            return (x,)

        return partial(nullcontext, predict)

    compared = compare(model("a", 1.0), model("b", 0.25), ROWS)
    assert compared.before.ventiles == pytest.approx([1000 / 1024] * 19, 1e-3)
    assert compared.speedup == pytest.approx(4)


def test_the_fastest_model_is_named_with_those_that_are_level(clock: Clock) -> None:
    # Faster and slower than 1.0 by blocks of two turns.
    now_and_then_faster = clock.model(*[0.9] * 100, *[1.3] * 110)
    models = [clock.model(2.0), now_and_then_faster, clock.model(1.0), clock.model(1.0)]
    measured = compare_latencies(models, ROWS, threads=1)
    assert [found.p50 for found in measured.latencies[2:]] == pytest.approx([1000 / 1024] * 2)
    assert measured.fastest()[0] in (1, 2)
    assert {*measured.fastest()} == {1, 2, 3}
    assert measured.comparison(0, 2).speedup == pytest.approx(2)


def test_an_unsteady_ratio_has_a_wide_interval(clock: Clock) -> None:
    unsteady = clock.model(*[0.5] * 97, *[1.0] * 101)
    low, high = compare(clock.model(1.0), unsteady, ROWS).interval
    assert (low, high) == pytest.approx((1, 2), rel=0.05)


def compared(*ratios: float, p95: tuple[float, float] = (1, 1)) -> Comparison:
    one = Latency(batch=1, p50=1.0, p95=1.0, p50_interval=(1, 1), p95_interval=p95, outliers=0.0)
    return Comparison(one, one, ratios)


def test_the_interval_is_that_of_the_tables() -> None:
    """Of 15 values the 4th to the 12th hold the median with 96.5 % (Conover 1999, table A3)."""
    found = compared(*range(15, 0, -1))
    assert found.speedup == 8
    assert found.interval == Interval(4.0, 12.0)


def test_percentiles_of_few_calls_stay_within_the_measured_range(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`statistics.quantiles` made 95 % of few calls take longer than the slowest."""
    monkeypatch.setattr(quantiles, "WIDEST", math.inf)
    times = [0.01, *[10.0] * 14, 30.0]
    # Two calls before those of each block warm up, and one tells how many calls make a turn.
    blocks = [1.0, 1.0, 1.0, *times[:2]]
    blocks += [called for i in range(2, 16, 2) for called in (1.0, 1.0, *times[i : i + 2])]
    after = compare(clock.model(1.0), clock.model(*blocks), ROWS, 1e-9).after
    lowest, highest = min(times) / 1.024, max(times) / 1.024
    for figure in (after.p50, after.p95, *after.p50_interval, *after.p95_interval):
        assert lowest <= figure <= highest
    assert after.ventiles == pytest.approx(np.quantile(times, np.arange(1, 20) / 20) / 1.024, 1e-3)
    assert after.p95 == pytest.approx(after.ventiles[18], 1e-3)
    assert after.p95_interval.high == highest


def test_a_model_whose_calls_take_long_is_called_a_few_times(clock: Clock) -> None:
    asked: list[int] = []

    @contextmanager
    def dear():
        yield lambda x: asked.append(len(x[0])) or clock.pass_time(1 + 0.01 * (len(asked) % 3)) or x

    lengths = [(torch.zeros(1, length),) for length in (9, 5, 7, 7, 1)]
    compared = compare(dear, clock.model(500.0), lengths)
    # Two to warm up, one that tells that they take long; all of the median size.
    assert asked == [7] * (2 + 1 + 4)
    assert compared.before.calls == compared.after.calls == len(compared.ratios) == 4
    assert compared.interval.low < compared.speedup < compared.interval.high
    assert not compared.unreliable_reason


def test_a_model_is_compared_with_itself_in_one_measurement(clock: Clock) -> None:
    asked: list[float] = []

    def model():
        return nullcontext(lambda x: asked.append(1) or clock.pass_time(1.0) or (x,))

    compared = compare(model, model, ROWS)
    assert len(asked) == 2 + 1 + 4
    assert (compared.speedup, *compared.interval) == (1, 1, 1)


def test_steady_models_are_measured_for_a_short_time(clock: Clock) -> None:
    compare(clock.model(1.0), clock.model(1.0), ROWS, 3.0)
    steady, start = clock.wall, clock.wall
    compare(clock.model(1.0), clock.model(*[1.0] * 60, *[1.2] * 60, *[0.9] * 60), ROWS, 3.0)
    assert clock.wall - start > 2 * steady


def test_an_uncertain_figure_is_measured_for_longer(clock: Clock) -> None:
    # As many slow calls as quick ones, in spells that a block does not see past.
    unsteady = clock.model(*[0.1] * 80, *[10.0] * 80)
    sure, unsure = compare(clock.model(10.0), clock.model(10.0), ROWS, 0.15), None
    assert not sure.interval.unreliable_reason
    began = clock.wall
    unsure = compare(clock.model(10.0), unsteady, ROWS, 0.15)
    assert clock.wall - began > 0.15 * benchmark.SECOND_TRY
    assert unsure.interval.unreliable_reason
    assert unsure.share is None
    assert sure.share == 1


def test_both_models_get_every_batch() -> None:
    batches = [(torch.full((2, 1), float(i)),) for i in range(5)]
    asked: list[list[float]] = [[], []]

    def model(own: list[float]) -> Opener:
        return partial(nullcontext, lambda x: own.append(float(x[0, 0])) or (x,))

    compare(model(asked[0]), model(asked[1]), batches, 1e-9)
    assert [asked[0].count(i) >= 3 for i in range(5)] == [True] * 5
    assert sorted(asked[0]) == sorted(asked[1])


def test_blocks_hold_quick_and_slow_inputs(clock: Clock) -> None:
    batches = [(torch.full((1, 1), float(i)),) for i in range(2)]

    def depends(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        clock.pass_time((1 + 100 * float(x[0, 0])) / 1024)
        return (x,)

    compared = compare(clock.model(51.0), partial(nullcontext, depends), batches, 1.2)
    assert compared.interval == pytest.approx((1, 1))
    assert compared.after.p50 == pytest.approx(51_000 / 1024)
    assert not compared.speedup_doubt


SIGNATURE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 1)),))


def rows(count: int) -> Splits:
    samples = TensorDataset(torch.arange(float(count))[:, None], torch.zeros(count).long())
    return Splits({"val": samples})


@pytest.mark.parametrize("batch", [1, 8, 300])
def test_models_are_measured_on_different_samples_of_val(batch: int) -> None:
    batches = [x for (x,) in measured_batches(rows(1000), SIGNATURE, batch, seed=0)]
    assert len(batches) >= 2
    assert {len(x) for x in batches} == {batch}
    for x in batches:
        assert len({*x[:, 0].tolist()}) == batch
    seen = torch.cat(batches)[:, 0]
    assert len({*seen.tolist()}) == len(seen)
    assert seen.min() < 100
    assert seen.max() > 900  # of all of it, as data may be sorted


def test_samples_repeat_where_val_is_short() -> None:
    batches = measured_batches(rows(3), SIGNATURE, 8, seed=0)
    assert all({*x[:, 0].tolist()} == {0.0, 1.0, 2.0} for (x,) in batches)


def test_without_val_a_seeded_batch_is_measured() -> None:
    (batch,) = measured_batches(None, SIGNATURE, 8, seed=3)
    assert batch[0].equal(SIGNATURE.example(8, 3)[0])
    train = Splits({"train": rows(9).datasets["val"]})
    (batch,) = measured_batches(train, SIGNATURE, 8, seed=3)
    assert batch[0].equal(SIGNATURE.example(8, 3)[0])


def test_min_speedup_uses_the_lower_end_of_the_interval(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    unsure = compared(*(1 + i / 7 for i in range(15)))
    monkeypatch.setattr(Context, "compare_latency", lambda *_: unsure)
    context = Context(root=tmp_path)
    assert unsure.speedup == 2
    assert not MinSpeedup(ratio=1.5).evaluate(None, None, context).passed
    assert MinSpeedup(ratio=1.4).evaluate(None, None, context).passed


def test_gates_refuse_uncertain_figures(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    unsure = compared(*(2.0**i for i in range(15)), p95=Interval(1, 2.5))
    monkeypatch.setattr(Context, "compare_latency", lambda *_: unsure)
    for gate, words in (
        (MinSpeedup(ratio=1e-9), "interval is 8 to 2.05e+03"),
        (MaxLatency(p95_ms=1e9), "interval is 1 to 2.5"),
    ):
        verdict = gate.evaluate(None, None, Context(root=tmp_path))
        assert verdict.value is None
        assert not verdict.passed
        assert "not measurable on this machine now" in verdict.reason
        assert words in verdict.reason


def test_measurement_keys_say_that_latency_is_measured_on_val() -> None:
    for gate in (MinSpeedup(ratio=1), MaxLatency(p95_ms=1), MaxMemory(mebibytes=1)):
        assert gate.measurement_key()["measured on"] == "val"


def test_rows_that_take_longer_count_with_their_share(clock: Clock) -> None:
    batches = [(torch.full((1, 1), float(i % 8 == 0)),) for i in range(64)]

    def predict(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        clock.pass_time((1 + 4 * float(x)) / 1024)
        return (x,)

    models = clock.model(3), partial(nullcontext, predict)
    found = compare_latencies(models, batches, threads=1, mixed=True).comparison(0, 1)
    mean = (7 * 1 + 5) / 8
    assert found.speedup == pytest.approx(3 / mean)
    assert found.after.mean == pytest.approx(1e3 * mean / 1024)
    assert found.after.p50 == pytest.approx(1e3 / 1024)
    assert found.after.p95 == found.after.p99 == pytest.approx(5e3 / 1024)
