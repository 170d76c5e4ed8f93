"""Randomized Hadamard matrices, as products that are never multiplied out."""

import pytest
import torch

from compress.quantization.algorithms import residual_rotation as hadamard
from compress.quantization.algorithms.residual_rotation import randomized_hadamard


def matrix_of(size: int, seed: int = 0) -> torch.Tensor:
    rotation = randomized_hadamard(size, torch.Generator().manual_seed(seed))
    return rotation.apply(torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [1, 2, 15, 64, 96, 80, 576])
def test_the_matrix_is_orthogonal(size: int) -> None:
    matrix = matrix_of(size)
    assert torch.allclose(matrix @ matrix.T, torch.eye(size).double(), atol=1e-12)


def test_of_a_power_of_two_all_entries_are_of_one_magnitude() -> None:
    assert torch.allclose(matrix_of(128).abs(), torch.full((128, 128), 128**-0.5).double())


def test_others_spread_a_channel_over_all() -> None:
    assert 0 < float(matrix_of(576).abs().max()) < 0.125  # 1/√576 is 0.042, 1/√64 is 0.125


def test_seeds_draw_others() -> None:
    assert torch.equal(matrix_of(32, 1), matrix_of(32, 1))
    assert not torch.equal(matrix_of(32, 1), matrix_of(32, 2))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_it_is_applied_along_an_axis_part_by_part(
    axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hadamard, "AT_ONCE", 100)
    rotation = randomized_hadamard(12, torch.Generator().manual_seed(0))
    values = torch.randn(12, 12, 12, generator=torch.Generator().manual_seed(1))
    expected = torch.tensordot(values.double(), matrix_of(12), ([axis], [0])).movedim(-1, axis)
    found = rotation.apply(values, axis)
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), expected, atol=1e-6)


def test_a_bias_is_rotated_after_a_scale() -> None:
    rotation = randomized_hadamard(12, torch.Generator().manual_seed(0))
    scale, values = torch.rand(12).double(), torch.randn(12)
    found = rotation.after_scaling(scale).apply(values)
    assert torch.allclose(found, rotation.apply((values * scale).float()), atol=1e-6)
