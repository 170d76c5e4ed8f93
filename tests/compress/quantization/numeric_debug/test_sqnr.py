import math

import numpy as np
import pytest
import torch

from compress.quantization.numeric_debug.sqnr import LARGEST_DB, OutputDeviation

INF, NAN = math.inf, math.nan


def deviation(expected: object, found: object) -> OutputDeviation:
    made = OutputDeviation()
    made.add(torch.as_tensor(expected), torch.as_tensor(found))
    return made


def test_deviations_add_up() -> None:
    deviation, other = OutputDeviation(), OutputDeviation()
    a = torch.tensor([[2.0, 0.0], [3.0, 4.0], [1.0, 0.0]])
    b = torch.tensor([[0.0, 2.0], [3.0, 4.0], [0.0, 1.0]])
    for row in range(3):
        deviation.add(a[row : row + 1], b[row : row + 1])
    other.add(a, b)
    assert deviation == other
    assert deviation.cosine == pytest.approx(1 / 3)
    assert deviation.sqnr_db == pytest.approx(10 * torch.log10(torch.tensor(30 / 10)).item())


def test_cosine_is_the_mean_over_rows() -> None:
    expected, found = np.random.default_rng(0).standard_normal((2, 4, 3, 5))
    made = deviation(expected, found)
    rows = zip(expected.reshape(4, -1), found.reshape(4, -1), strict=True)
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in rows]
    assert made.cosine == pytest.approx(np.mean(cosines))
    noise = ((expected - found) ** 2).sum()
    assert made.sqnr_db == pytest.approx(10 * np.log10((expected**2).sum() / noise))
    flat = deviation([3.0, 4.0], [4.0, 3.0])  # one row, as one axis is no batch
    assert flat.rows == 1 and flat.cosine == pytest.approx(24 / 25)
    assert deviation(3.0, -2.0).cosine == -1


@pytest.mark.parametrize(
    ("expected", "found", "sqnr", "cosine"),
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], LARGEST_DB, 1),
        ([[0.0, 0.0]], [[0.0, 0.0]], LARGEST_DB, 1),
        ([[0.0, 0.0]], [[0.0, 1.0]], -LARGEST_DB, 0),
        ([[0.0, 1.0]], [[0.0, 0.0]], 0, 0),
        ([[0.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]], 0, 0.5),
        ([[1.0, 1e-9]], [[1.0, 0.0]], LARGEST_DB, 1),
        ([[1e-9, 0.0]], [[1e-9, 1.0]], -LARGEST_DB, 1e-9),
        ([[3.0, -INF]], [[3.0, 7.0]], LARGEST_DB, 1),  # a mask
        ([[3.0, NAN]], [[1.5, 7.0]], 10 * math.log10(4), 1),
        ([[3.0, 1.0]], [[3.0, INF]], -LARGEST_DB, 0),
        ([[3.0, 1.0]], [[3.0, NAN]], -LARGEST_DB, 0),
    ],
)
def test_equal_and_infinite_tensors_have_an_sqnr(expected, found, sqnr, cosine) -> None:
    made = deviation(expected, found)
    assert made.sqnr_db == pytest.approx(sqnr, abs=1e-9)
    assert made.cosine == pytest.approx(cosine)
    assert made.is_finite == torch.tensor(found)[torch.tensor(expected).isfinite()].isfinite().all()
    assert OutputDeviation().cosine == 0
