import itertools
import math

import pytest
import torch

from compress.quantization.algorithms import layer_corrections as corrections
from compress.quantization.algorithms.layer_corrections import LayerMoments


@pytest.mark.parametrize("done", [0.2, 0.5, 0.99])
def test_the_penalty_gradient_is_that_of_the_papers_regularizer(done: float) -> None:
    """Equation 22: 1 - |2 h - 1| ** beta, whose beta falls from 20 to 2 along half a cosine."""
    beta = 2 + 18 * (1 + math.cos(math.pi * (done - 0.2) / 0.8)) / 2
    share = torch.tensor([0.05, 0.3, 0.5, 0.7, 0.95], dtype=torch.float64, requires_grad=True)
    (5 * (1 - (2 * share - 1).abs() ** beta)).sum().backward()
    torch.testing.assert_close(corrections._penalty_gradient(share.detach(), done), share.grad)
    assert not corrections._penalty_gradient(share.detach(), 0.19).any()


def test_the_rectified_sigmoid_is_the_papers() -> None:
    """Equation 23, with zeta 1.1 and gamma -0.1."""
    share = torch.tensor([0.0, 0.2, 0.5, 0.9, 0.999])
    torch.testing.assert_close(
        corrections._rectified_sigmoid(corrections._inverse_sigmoid(share)), share
    )
    choice = torch.tensor([-9.0, -1.0, 0.5, 9.0])
    expected = [min(1, max(0, 1.2 / (1 + math.exp(-x)) - 0.1)) for x in choice.tolist()]
    assert corrections._rectified_sigmoid(choice).tolist() == pytest.approx(expected)


def test_adaptive_rounding_comes_near_the_best_of_all_choices() -> None:
    """Of 2**8 ways to round each row, judged by the outputs for quantized inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 8, generator=generator) @ torch.randn(8, 8, generator=generator)
    y = 0.8 * x + 0.1 * torch.randn(200, 8, generator=generator)
    weight = torch.randn(1, 6, 8, generator=generator)
    weight[0, 0, 0] = 9  # beyond the largest integer
    step = torch.full((1, 6, 1), 0.5)
    step[0, 3] = 0.3
    noise = weight[0] @ (x - y).T
    moments = LayerMoments((y.T @ y / 200)[None].double(), (noise @ y / 200)[None].double())
    found = corrections.round_adaptively(weight, step, (-7, 7), moments, 500)
    assert torch.equal(found, found.round()) and found.min() >= -7 and found.max() <= 7
    choices = torch.tensor(list(itertools.product((0.0, 1.0), repeat=8)))
    for row, scale, chosen in zip(weight[0], step[0], found[0], strict=True):
        exact = row / scale

        def error(integers: torch.Tensor) -> torch.Tensor:
            return ((y @ integers.T * scale).T - x @ row).square().mean(-1)  # noqa: B023

        errors = error((exact.floor() + choices).clamp(-7, 7))
        nearest = error(exact.round().clamp(-7, 7)[None])
        assert error(chosen[None]) <= errors.min() + 0.1 * (nearest - errors.min())
