import itertools

import pytest
import torch

from compress.core import latency
from compress.core.gates import MinSpeedup
from compress.core.latency import Comparison, Interval, Latency, compare_latency
from compress.core.stage import Context

ROWS = (torch.zeros(3, 1),)


def test_two_models_are_asked_in_turn() -> None:
    asked: list[str] = []

    def predictor(name: str):
        def predict(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            asked.append(name)
            return (x,)

        return predict

    compared = compare_latency(predictor("a"), predictor("b"), ROWS)
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


def test_slow_spells_move_neither_the_ratio_nor_its_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(latency, "time", clock)
    disturbed = clock.model(*[0.5] * 40, *[5.0] * 4)
    compared = compare_latency(clock.model(1.0), disturbed, ROWS)
    assert compared.speedup == pytest.approx(2)
    assert compared.interval == pytest.approx((2, 2))
    assert compared.before.outliers == 0
    assert compared.after.outliers == pytest.approx(4 / 44, abs=0.01)
    assert compared.after.p95 == pytest.approx(5000 / 1024)


def test_an_unsteady_ratio_has_a_wide_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(latency, "time", clock)
    unsteady = clock.model(*[0.5] * 97, *[1.0] * 101)
    low, high = compare_latency(clock.model(1.0), unsteady, ROWS).interval
    assert (low, high) == pytest.approx((1, 2), rel=0.05)


def compared(*ratios: float) -> Comparison:
    one = Latency(batch=1, p50=1.0, p95=1.0, outliers=0.0)
    return Comparison(one, one, ratios)


def test_the_interval_is_that_of_the_tables() -> None:
    """Of 15 values the 4th to the 12th hold the median with 96.5 % (Conover 1999, table A3)."""
    found = compared(*range(15, 0, -1))
    assert found.speedup == 8
    assert found.interval == Interval(4.0, 12.0)


def test_the_gate_judges_the_lower_end(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    unsure = compared(*(1 + i / 7 for i in range(15)))
    monkeypatch.setattr(Context, "compare_latency", lambda *_: unsure)
    context = Context(root=tmp_path)
    assert unsure.speedup == 2
    assert not MinSpeedup(ratio=1.5).judge(None, None, context).passed
    assert MinSpeedup(ratio=1.4).judge(None, None, context).passed
