"""No NaN and no other infinity may look like a small difference."""

import itertools
import math

import pytest
import torch

from compress.core import difference
from compress.core.difference import identical, largest, largest_difference, relative_error

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("values", list(itertools.permutations([0.0, 1.0, NAN, INF])))
def test_the_largest_of_numbers_is_nan_wherever_nan_stands(values: tuple[float, ...]) -> None:
    assert math.isnan(largest(values))
    assert largest(v for v in values if not math.isnan(v)) == INF


def test_the_largest_of_nothing_is_no_difference() -> None:
    assert largest([]) == 0
    assert largest_difference(torch.zeros(0, 3), torch.zeros(0, 3)) == 0


@pytest.mark.parametrize(
    ("expected", "got", "largest", "relative"),
    [
        ([1, 2], [1, 2.5], 0.5, 0.5 / 5**0.5),
        ([-INF, 2], [-INF, 2], 0, 0),
        ([-INF, 2], [-INF, 3], 1, 0.5),
        ([-INF, 2], [INF, 2], INF, INF),
        ([-INF, 2], [-1e30, 2], INF, INF),
        ([1, 2], [NAN, 2], NAN, INF),
        ([NAN, 2], [NAN, 2], NAN, 0),
        ([NAN, 2], [1, 2], NAN, INF),
    ],
)
def test_numbers_infinities_and_nan(
    expected: list[float],
    got: list[float],
    largest: float,
    relative: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a, b = torch.tensor(expected), torch.tensor(got)
    for at_once in (2**20, 1):
        monkeypatch.setattr(difference, "AT_ONCE", at_once)
        assert largest_difference(a, b) == pytest.approx(largest, nan_ok=True)
        assert relative_error(a, b) == pytest.approx(relative)


def test_other_shapes_are_infinitely_far() -> None:
    row, column = torch.ones(1, 2), torch.ones(2, 1)
    assert relative_error(row, column) == largest_difference(row, column) == INF
    assert not identical(row, column)


def test_the_same_elements_are_identical_and_zero_is_not_nan() -> None:
    x = torch.tensor([1, NAN, -INF])
    assert identical(x, x.clone())
    assert not identical(x, x.nan_to_num())
    assert not identical(x.nan_to_num(), x)
