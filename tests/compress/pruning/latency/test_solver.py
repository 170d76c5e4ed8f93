"""The solver finds what trying every choice finds."""

import random
from itertools import combinations, product

import pytest

from compress.profiling.interaction_sum import InteractionSum
from compress.pruning.latency.solver import Limit, Programme

SCOPES = [("a", "b"), ("b", "c"), ("c", "d"), ("f", "a", "b"), ("g", "b", "c"), ("f", "g")]
"""Kernels between two widths, two of them in one of two formats, and a conversion between these."""


def problem(seed: int) -> tuple[Programme, InteractionSum, InteractionSum]:
    draw = random.Random(seed)
    grid = dict.fromkeys(("a", "b", "c", "d"), (4, 3, 2))
    grid |= dict.fromkeys(("f", "g"), ("quantized", "float"))
    loss_increase = {
        g: {w: draw.random() * i for i, w in enumerate(own)} for g, own in grid.items()
    }
    loss_increase |= {layer: {"quantized": draw.random(), "float": 0.0} for layer in ("f", "g")}
    scopes = {part for s in SCOPES for size in (2, 3) for part in combinations(s, size)}

    def quantity() -> InteractionSum:
        single = {
            (g,): {(w,): i - 4.5 * draw.random() for i, w in enumerate(own) if i}
            for g, own in grid.items()
        }
        several = {
            s: {v: draw.uniform(-0.5, 0.5) for v in product(*(grid[d][1:] for d in s))}
            for s in sorted(scopes)
        }
        return InteractionSum(10.0, {**single, **several})

    return Programme(grid, loss_increase), quantity(), quantity()


def every_choice(programme: Programme):
    for values in product(*programme.grid.values()):
        yield dict(zip(programme.grid, values, strict=True))


@pytest.mark.parametrize("seed", range(6))
def test_the_least_harm_within_limits_is_that_of_all_choices(seed: int) -> None:
    programme, latency, size = problem(seed)
    limits = [Limit(q, sorted(map(q, every_choice(programme)))[60]) for q in (latency, size)]
    allowed = [c for c in every_choice(programme) if all(i.quantity(c) <= i.most for i in limits)]
    loss_increases = sorted(map(programme.total_loss_increase, allowed))
    assert 2 < len(loss_increases) < 60
    found = programme.solve(limits, tie=0.0)
    assert found in allowed
    assert programme.total_loss_increase(found) == pytest.approx(loss_increases[0], abs=1e-3)
    second = programme.solve(limits, [found], tie=0.0)
    assert second in allowed and second != found
    assert programme.total_loss_increase(second) == pytest.approx(loss_increases[1], abs=1e-3)


def test_limits_that_nothing_meets_have_no_answer() -> None:
    programme, latency, _ = problem(0)
    least = min(map(latency, every_choice(programme)))
    assert programme.solve([Limit(latency, least - 0.01)]) is None
    assert programme.solve([Limit(latency, least + 0.01)]) is not None


def test_of_equal_harm_the_cheaper_is_chosen() -> None:
    grid = {"a": (2, 1), "b": (2, 1)}
    latency = InteractionSum(4.0, {("a",): {(1,): -1.0}, ("b",): {(1,): -2.0}})
    free = Programme(grid, {"a": {2: 0.0, 1: 0.0}, "b": {2: 0.0, 1: 0.0}})
    assert free.solve([Limit(latency, 10.0)]) == {"a": 1, "b": 1}


def test_neighbours_in_one_format_need_no_conversion() -> None:
    grid = dict.fromkeys(("f", "g", "h"), ("quantized", "float"))
    single = {(name,): {("float",): 1.0} for name in grid}
    # Between two neighbours in float the conversions that each of them alone needs are gone.
    latency = InteractionSum(3.0, {**single, ("f", "g"): {("float", "float"): -0.8}})
    loss_increase = {"f": 1.0, "g": 1.0, "h": 1.5}
    programme = Programme(
        grid, {n: {"quantized": h, "float": 0.0} for n, h in loss_increase.items()}
    )
    for most, floats in ((4.1, {"h"}), (4.3, {"f", "g"})):
        found = programme.solve([Limit(latency, most)])
        assert {name for name, value in found.items() if value == "float"} == floats
