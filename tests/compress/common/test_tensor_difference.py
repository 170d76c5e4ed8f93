"""No NaN and no other infinity may look like a small difference."""

import itertools
import math

import numpy as np
import pytest
import torch

from compress.common import tensor_difference
from compress.common.tensor_difference import (
    columns,
    largest,
    largest_difference,
    measured,
    relative_error,
)

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("values", list(itertools.permutations([0.0, 1.0, NAN, INF])))
def test_the_largest_of_numbers_is_nan_wherever_nan_stands(values: tuple[float, ...]) -> None:
    assert math.isnan(largest(values))
    assert largest(v for v in values if not math.isnan(v)) == INF


def test_the_largest_of_nothing_is_no_difference() -> None:
    assert largest([]) == 0
    assert largest_difference(torch.zeros(0, 3), torch.zeros(0, 3)) == 0


def test_the_relative_error_is_the_norm_of_the_difference_over_the_norm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, got = np.random.default_rng(0).standard_normal((2, 3, 7)).astype("float32")
    norm = np.linalg.norm(got.astype(float) - expected) / np.linalg.norm(expected.astype(float))
    pair = torch.from_numpy(expected), torch.from_numpy(got)
    assert relative_error(*pair) == pytest.approx(norm, rel=1e-12)
    monkeypatch.setattr(tensor_difference, "AT_ONCE", 4)  # in parts
    assert relative_error(*pair) == pytest.approx(norm, rel=1e-12)
    assert relative_error(torch.zeros(4), torch.full((4,), 1e-9)) == pytest.approx(2)
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0


@pytest.mark.parametrize(
    ("expected", "got", "largest", "relative"),
    [
        ([1, 2], [1, 2.5], 0.5, 0.5 / 5**0.5),
        ([-INF, 2], [-INF, 2], 0, 0),
        ([-INF, 2], [-INF, 3], 1, 0.5),
        ([-INF, 2], [INF, 2], INF, INF),
        ([-INF, 2], [-1e30, 2], INF, INF),
        ([1, 2], [INF, 2], INF, INF),
        ([NAN, 2], [INF, 2], NAN, INF),
        ([INF, 3, NAN, -INF], [INF, 6, NAN, -INF], NAN, 1),
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
        monkeypatch.setattr(tensor_difference, "AT_ONCE", at_once)
        assert largest_difference(a, b) == pytest.approx(largest, nan_ok=True)
        assert relative_error(a, b) == pytest.approx(relative)


def test_other_shapes_are_infinitely_far() -> None:
    row, column = torch.ones(1, 2), torch.ones(2, 1)
    assert relative_error(row, column) == largest_difference(row, column) == INF


def test_only_what_is_not_finite_counts_as_zero() -> None:
    a, b = measured(torch.tensor([INF, 2.0, NAN, 5]), torch.tensor([INF, 2.0, NAN, 6]))
    assert a.tolist() == [0, 2, 0, 5] and b.tolist() == [0, 2, 0, 6]
    assert a.dtype == b.dtype == torch.float64


def test_columns_are_all_rows_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_difference, "AT_ONCE", 7)
    expected = torch.arange(30).reshape(3, 2, 5)
    parts = list(columns(expected, -expected))
    assert [tuple(a.shape) for a, _ in parts] == [(3, 2)] * 5
    assert torch.equal(torch.cat([a for a, _ in parts], 1), expected.flatten(1))
    assert all(torch.equal(a, -b) for a, b in parts)
    wide = torch.ones(9, 2)  # more rows than are compared at a time
    assert [tuple(a.shape) for a, _ in columns(wide, wide)] == [(9, 1)] * 2
    assert [a.tolist() for a, _ in columns(torch.tensor(3.0), torch.tensor(4.0))] == [[[3.0]]]
    assert list(columns(torch.ones(0, 3), torch.ones(0, 3))) == []
