import math

import numpy as np
import pytest
import torch
from export.difference import columns, measured, relative_error

from export import difference

INF, NAN = math.inf, math.nan


def test_it_is_the_norm_of_the_difference_over_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, got = np.random.default_rng(0).standard_normal((2, 3, 7)).astype("float32")
    norm = np.linalg.norm(got.astype(float) - expected) / np.linalg.norm(expected.astype(float))
    pair = torch.from_numpy(expected), torch.from_numpy(got)
    assert relative_error(*pair) == pytest.approx(norm, rel=1e-12)
    monkeypatch.setattr(difference, "AT_ONCE", 4)  # in parts
    assert relative_error(*pair) == pytest.approx(norm, rel=1e-12)
    assert relative_error(torch.zeros(4), torch.full((4,), 1e-9)) == pytest.approx(2)
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0


@pytest.mark.parametrize(
    ("expected", "got", "error"),
    [
        ([INF, 3.0, NAN, -INF], [INF, 6.0, NAN, -INF], 1.0),
        ([INF, 3.0], [-INF, 3.0], INF),
        ([INF, 3.0], [1.0, 3.0], INF),
        ([1.0, 3.0], [INF, 3.0], INF),
        ([1.0, NAN], [1.0, 3.0], INF),
        ([1.0, 3.0], [1.0, NAN], INF),
        ([NAN, 3.0], [INF, 3.0], INF),
        ([3.0, 4.0], [3.0], INF),
    ],
)
def test_what_is_equally_not_finite_is_equal(expected, got, error) -> None:
    assert relative_error(torch.tensor(expected), torch.tensor(got)) == error


def test_only_what_is_not_finite_counts_as_zero() -> None:
    a, b = measured(torch.tensor([INF, 2.0, NAN, 5]), torch.tensor([INF, 2.0, NAN, 6]))
    assert a.tolist() == [0, 2, 0, 5] and b.tolist() == [0, 2, 0, 6]
    assert a.dtype == b.dtype == torch.float64


def test_columns_are_all_rows_of_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "AT_ONCE", 7)
    expected = torch.arange(30).reshape(3, 2, 5)
    parts = list(columns(expected, -expected))
    assert [tuple(a.shape) for a, _ in parts] == [(3, 2)] * 5
    assert torch.equal(torch.cat([a for a, _ in parts], 1), expected.flatten(1))
    assert all(torch.equal(a, -b) for a, b in parts)
    wide = torch.ones(9, 2)  # more rows than are compared at a time
    assert [tuple(a.shape) for a, _ in columns(wide, wide)] == [(9, 1)] * 2
    assert [a.tolist() for a, _ in columns(torch.tensor(3.0), torch.tensor(4.0))] == [[[3.0]]]
    assert list(columns(torch.ones(0, 3), torch.ones(0, 3))) == []
