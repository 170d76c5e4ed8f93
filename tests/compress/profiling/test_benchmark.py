import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import MaxLatency, MaxMemory, MinSpeedup
from compress.data.splits import Splits
from compress.profiling import benchmark, quantiles
from compress.profiling.benchmark import Comparison, Latency, compare_latency, measured_batches
from compress.profiling.quantiles import Interval

ROWS = [(torch.zeros(3, 1),)]


def test_two_models_are_called_in_turn() -> None:
    asked: list[str] = []

    def predictor(name: str):
        def predict(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            asked.append(name)
            return (x,)

        return predict

    compared = compare_latency(predictor("a"), predictor("b"), ROWS, 0.01)
    assert asked[:4] == ["a", "b", "a", "b"]
    assert asked.count("a") == asked.count("b")
    assert compared.before.batch == 3
    assert 0 < compared.after.p50 <= compared.after.p95


class Clock:
    """Time that passes where a model is asked, and nowhere else."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def model(self, *times: float):
        """Return a model whose calls take these times, in 1/1024 seconds, over and over."""
        turns = itertools.cycle(times)

        def predict(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.now += next(turns) / 1024  # exact in binary
            return (x,)

        return predict


def test_a_slow_period_changes_neither_the_ratio_nor_its_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(benchmark, "time", clock)
    disturbed = clock.model(*[0.5] * 40, *[5.0] * 4)
    compared = compare_latency(clock.model(1.0), disturbed, ROWS, 3.0)
    assert compared.speedup == pytest.approx(2)
    assert compared.interval == pytest.approx((2, 2))
    assert compared.before.outliers == 0
    assert compared.after.outliers == pytest.approx(4 / 44, abs=0.01)
    assert compared.after.p95 == pytest.approx(5000 / 1024)


def test_the_fastest_model_is_named_with_those_that_are_level(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(benchmark, "time", clock)
    now_and_then_faster = clock.model(*[0.9] * 20, *[1.3] * 23)
    models = [clock.model(2.0), now_and_then_faster, clock.model(1.0), clock.model(1.0)]
    measured = benchmark.compare_latencies(models, ROWS)
    assert [found.p50 for found in measured.latencies] == pytest.approx(
        [n * 1000 / 1024 for n in (2.0, 1.3, 1.0, 1.0)]
    )
    assert measured.fastest() == (2, 1, 3)
    assert measured.comparison(0, 2).speedup == pytest.approx(2)


def test_an_unsteady_ratio_has_a_wide_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(benchmark, "time", clock)
    unsteady = clock.model(*[0.5] * 97, *[1.0] * 101)
    low, high = compare_latency(clock.model(1.0), unsteady, ROWS).interval
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """15 calls, one of them slow: `statistics.quantiles` made 95 % of them take 1.6 times the
    slowest, and 5 % of them less than no time."""
    clock = Clock()
    monkeypatch.setattr(benchmark, "time", clock)
    monkeypatch.setattr(quantiles, "WIDEST", math.inf)
    times = [1.0, *[1000.0] * 13, 3000.0]
    after = compare_latency(clock.model(1.0), clock.model(1, 1, *times), ROWS, 0).after
    lowest, highest = min(times) / 1.024, max(times) / 1.024
    for figure in (after.p50, after.p95, *after.p50_interval, *after.p95_interval):
        assert lowest <= figure <= highest
    assert after.ventiles == pytest.approx(np.quantile(times, np.arange(1, 20) / 20) / 1.024, 1e-3)
    assert (after.p50, after.p95) == pytest.approx((after.ventiles[9], after.ventiles[18]), 1e-3)
    assert after.p95_interval.high == highest


@pytest.mark.parametrize(("times", "share"), [((1.0,), 0.25), ((1.0, 1.2, 0.9), 1.0)])
def test_steady_models_are_measured_for_a_quarter_of_the_time(
    times: tuple[float, ...], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(benchmark, "time", clock)
    monkeypatch.setattr(benchmark, "MINIMUM_ROUNDS", 1)
    spells = [each for each in times for _ in range(40)]
    compare_latency(clock.model(1.0), clock.model(*spells), ROWS)
    warming = 2 * benchmark.MEASURED_SECONDS / 4
    assert clock.now - warming == pytest.approx(2 * share * benchmark.MEASURED_SECONDS, rel=0.1)


def test_an_uncertain_figure_is_measured_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(benchmark, "time", clock)
    # As many slow calls as quick ones, in spells that fifteen calls do not see past.
    unsteady = clock.model(*[0.1] * 8, *[10.0] * 8)
    sure, unsure = compare_latency(clock.model(10.0), clock.model(10.0), ROWS, 0.15), None
    assert not sure.interval.unreliable_reason
    began = clock.now
    unsure = compare_latency(clock.model(10.0), unsteady, ROWS, 0.15)
    assert clock.now - began > 0.15 * benchmark.SECOND_TRY
    assert unsure.interval.unreliable_reason
    assert unsure.share is None
    assert sure.share == 1


def test_both_models_get_every_batch() -> None:
    batches = [(torch.full((2, 1), float(i)),) for i in range(5)]
    asked: list[list[float]] = [[], []]

    def model(own: list[float]):
        def predict(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            own.append(float(x[0, 0]))
            return (x,)

        return predict

    compare_latency(model(asked[0]), model(asked[1]), batches, 0)
    assert asked[0] == asked[1]
    assert [asked[0].count(i) >= 3 for i in range(5)] == [True] * 5


def test_blocks_cover_all_batches_so_that_slow_inputs_add_no_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(benchmark, "time", clock)
    batches = [(torch.full((1, 1), float(i)),) for i in range(2)]

    def depends(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        clock.now += (1 + 100 * float(x[0, 0])) / 1024
        return (x,)

    # About 24 rounds: blocks of one call each would be of quick or of slow inputs.
    compared = compare_latency(clock.model(51.0), depends, batches, 1.2)
    assert clock.now < 2 * 2 * 1.2  # so long once, and not again as if it were noise
    assert compared.after.p95 == pytest.approx(101_000 / 1024)
    assert compared.interval == pytest.approx((1, 1))
    assert not compared.after.unreliable_reason


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
