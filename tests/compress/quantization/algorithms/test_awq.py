import pytest
import torch

from compress.quantization.algorithms.input_scaling import EXPONENTS, awq_scales, best_exponent
from compress.quantization.algorithms.weight_rounding import round_to_nearest

BITS, GROUP = 4, 16


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return round_to_nearest(weight, BITS, GROUP).dequantize()


def drawn(large: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and inputs, one channel in sixteen larger than the others."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 64, generator=generator)
    inputs[:, ::16] *= large
    return torch.randn(48, 64, generator=generator), inputs


def test_weights_of_large_inputs_err_less() -> None:
    weight, inputs = drawn(large=20)
    moment = inputs.T @ inputs / len(inputs)
    power = best_exponent(weight, moment, rounded, 0.9)
    assert 0 < power < 1
    scale = awq_scales(moment, power)
    expected = inputs @ weight.T
    scaled, plain = (
        (inputs / s @ rounded(weight * s).T - expected).norm() for s in (scale, scale**0)
    )
    assert scaled < 0.7 * plain


def test_equal_inputs_need_no_scale() -> None:
    weight, inputs = drawn(large=1)
    assert best_exponent(weight, inputs.T @ inputs / len(inputs), rounded, 0.9) == 0


def test_weights_that_are_exact_need_no_scale() -> None:
    assert best_exponent(torch.zeros(48, 64), torch.eye(64), rounded, 1.0) == 0


def test_a_channel_that_is_always_zero_has_a_finite_scale() -> None:
    _, inputs = drawn(large=20)
    inputs[:, 5] = 0
    scale = awq_scales(inputs.T @ inputs / len(inputs), 1.0)
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()


@pytest.mark.parametrize("power", [0.3, 1.0])
def test_scales_are_powers_of_the_root_mean_square(power: float) -> None:
    moment = torch.diag(torch.tensor([4.0, 1.0, 0.0, 1e-12])) + 0.5 - 0.5 * torch.eye(4)
    sizes = torch.tensor([2.0, 1.0, 0.0, 1e-6]) / 2
    expected = sizes.clamp(min=1e-4) ** power
    expected /= (1e-4**power) ** 0.5  # the largest is 1, and the mean of the ends' logarithms 0
    torch.testing.assert_close(awq_scales(moment, power), expected)
    torch.testing.assert_close(awq_scales(100 * moment, power), awq_scales(moment, power))
    assert torch.equal(awq_scales(torch.zeros(3, 3), power), torch.ones(3))


@pytest.mark.parametrize("large", [3, 20, 100])
def test_the_exponent_has_the_least_error_on_the_samples(large: float) -> None:
    weight, inputs = drawn(large)
    moment = inputs.T @ inputs / len(inputs)

    def error(scale: torch.Tensor) -> float:
        answers = (inputs / scale).double() @ rounded(weight * scale).T.double()
        return float((answers - inputs.double() @ weight.T.double()).square().sum())

    errors = [error(awq_scales(moment, power)) for power in EXPONENTS]
    best = EXPONENTS[errors.index(min(errors))]
    left = min(errors) / error(torch.ones(64))
    assert best_exponent(weight, moment, rounded, left * 1.001) == best
    assert best_exponent(weight, moment, rounded, left * 0.999) == 0
