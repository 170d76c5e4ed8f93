"""The solver finds what trying every choice finds."""

import random
from itertools import product

import pytest

from export.latency.width_costs import PairwiseSum
from pipelines.auto.solver import Limit, Programme


def problem(seed: int) -> tuple[Programme, PairwiseSum, PairwiseSum]:
    draw = random.Random(seed)
    grid = {group: tuple(range(4, 0, -1)) for group in ("a", "b", "c", "d")}
    harm = {g: {w: draw.random() * (4 - w) for w in widths} for g, widths in grid.items()}
    pairs = [("a", "b"), ("b", "c"), ("c", "d")]

    def quantity() -> PairwiseSum:
        single = {g: {w: -draw.random() * (4 - w) for w in widths} for g, widths in grid.items()}
        pair = {
            both: {w: draw.uniform(-0.5, 0.5) for w in product(grid[both[0]], grid[both[1]])}
            for both in pairs
        }
        return PairwiseSum(10.0, single, pair)

    return Programme(grid, harm), quantity(), quantity()


def every_choice(programme: Programme):
    for widths in product(*programme.grid.values()):
        yield dict(zip(programme.grid, widths, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_the_least_harm_within_limits_is_that_of_all_choices(seed: int) -> None:
    programme, latency, size = problem(seed)
    limits = [Limit(latency, 7.0), Limit(size, 8.0)]
    allowed = [w for w in every_choice(programme) if latency(w) <= 7 and size(w) <= 8]
    harms = sorted(map(programme.total_harm, allowed))
    found = programme.solve(limits, tie=0.0)
    assert found in allowed
    assert programme.total_harm(found) == pytest.approx(harms[0], abs=1e-3)
    second = programme.solve(limits, [found], tie=0.0)
    assert second in allowed and second != found
    assert programme.total_harm(second) == pytest.approx(harms[1], abs=1e-3)


def test_limits_that_nothing_meets_have_no_answer() -> None:
    programme, latency, _ = problem(0)
    least = min(map(latency, every_choice(programme)))
    assert programme.solve([Limit(latency, least - 0.01)]) is None
    assert programme.solve([Limit(latency, least + 0.01)]) is not None


def test_of_equal_harm_the_cheaper_is_chosen() -> None:
    grid = {"a": (2, 1), "b": (2, 1)}
    latency = PairwiseSum(4.0, {"a": {2: 0.0, 1: -1.0}, "b": {2: 0.0, 1: -2.0}}, {})
    free = Programme(grid, {"a": {2: 0.0, 1: 0.0}, "b": {2: 0.0, 1: 0.0}})
    assert free.solve([Limit(latency, 10.0)]) == {"a": 1, "b": 1}
