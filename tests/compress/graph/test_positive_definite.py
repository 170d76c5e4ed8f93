"""Several systems of equations at once, on as many threads as a search has."""

import torch

from compress.common.process import torch_threads
from compress.graph.positive_definite import solve_positive_definite


def test_many_systems_are_solved_on_two_threads() -> None:
    # oneMKL's LU of these, as of a convolution of 96 x 3, ended with an error on an AMD processor.
    factors = torch.randn(1, 20, 288, 288, dtype=torch.float64)
    matrices = factors @ factors.mT + 288 * torch.eye(288, dtype=torch.float64)
    expected = torch.randn(1, 20, 288, 200, dtype=torch.float64)
    with torch_threads(2):
        found = solve_positive_definite(matrices, matrices @ expected)
    torch.testing.assert_close(found, expected)


def test_matrices_that_rounding_left_indefinite_are_solved_too() -> None:
    matrices = torch.tensor([[[2.0, 0.0], [0.0, -1e-3]], [[1.0, 0.0], [0.0, 4.0]]]).double()
    answers = torch.ones(2, 2, 1).double()
    found = solve_positive_definite(matrices, answers)
    torch.testing.assert_close(found.flatten(), torch.tensor([0.5, -1000, 1, 0.25]).double())
