import torch

from compress.quantization.awq import best_power, scales
from compress.quantization.rounding import round_to_nearest

BITS, GROUP = 4, 16


def rounded(weight: torch.Tensor) -> torch.Tensor:
    return round_to_nearest(weight, BITS, GROUP).floats()


def drawn(large: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and inputs, one channel in sixteen larger than the others."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 64, generator=generator)
    inputs[:, ::16] *= large
    return torch.randn(48, 64, generator=generator), inputs


def test_what_is_multiplied_with_large_inputs_errs_less() -> None:
    weight, inputs = drawn(large=20)
    moment = inputs.T @ inputs / len(inputs)
    power = best_power(weight, moment, rounded, 0.9)
    assert 0 < power < 1
    scale = scales(moment, power)
    expected = inputs @ weight.T
    scaled, plain = (
        (inputs / s @ rounded(weight * s).T - expected).norm() for s in (scale, scale**0)
    )
    assert scaled < 0.7 * plain


def test_equal_inputs_need_no_scale() -> None:
    weight, inputs = drawn(large=1)
    assert best_power(weight, inputs.T @ inputs / len(inputs), rounded, 0.9) == 0


def test_a_channel_that_is_always_silent_is_divided_by_a_finite_number() -> None:
    _, inputs = drawn(large=20)
    inputs[:, 5] = 0
    scale = scales(inputs.T @ inputs / len(inputs), 1.0)
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
