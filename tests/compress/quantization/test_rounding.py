import pytest
import torch

from compress.quantization.rounding import (
    grouped,
    half_quadratic,
    optimal_brain,
    packed,
    round_to_nearest,
)


@pytest.fixture
def weight() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(24, 64, generator=generator) * torch.rand(24, 1, generator=generator).exp()


@pytest.fixture
def inputs() -> torch.Tensor:
    """Return inputs that go together, as those of real layers do."""
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(16, 64, generator=generator)
    return torch.randn(512, 16, generator=generator) @ mixing + 0.1 * torch.randn(
        512, 64, generator=generator
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_no_number_is_further_off_than_half_a_step(weight: torch.Tensor, bits: int) -> None:
    rounded = round_to_nearest(weight, bits, 16)
    off_OGS = grouped((rounded.floats() - weight).abs(), 4)
    # Where the zero point was rounded, the outermost numbers lie up to a whole step off.
    assert (off_OGS <= rounded.scale_OG[..., None] * 1.001).all()
    inner = (rounded.integers_OI > 0) & (rounded.integers_OI < 2**bits - 1)
    assert (off_OGS <= rounded.scale_OG[..., None] * 0.501)[grouped(inner, 4)].all()
    assert off_OGS.max() > 0


def test_zero_stays_zero(weight: torch.Tensor) -> None:
    weight[:, 3] = 0
    weight[5] = 0
    for rounded in (round_to_nearest(weight, 4, 32),):
        assert (rounded.floats()[:, 3] == 0).all()
        assert (rounded.floats()[5] == 0).all()


def test_half_quadratic_is_nearer_where_few_numbers_are_large(weight: torch.Tensor) -> None:
    nearest, fitted = (f(weight, 4, 32).floats() for f in (round_to_nearest, half_quadratic))
    norm = lambda found: (found - weight).abs().pow(0.7).mean()  # noqa: E731
    assert norm(fitted) < norm(nearest)
    zero_OG = half_quadratic(weight, 4, 32).zero_OG
    assert not torch.equal(zero_OG, zero_OG.round())


def test_optimal_brain_answers_nearer_on_its_inputs(
    weight: torch.Tensor, inputs: torch.Tensor
) -> None:
    moment = inputs.T @ inputs / len(inputs)
    expected = inputs @ weight.T
    errors = [
        float((inputs @ rounded.floats().T - expected).norm() / expected.norm())
        for rounded in (
            round_to_nearest(weight, 4, 32),
            optimal_brain(weight, 4, 32, moment),
        )
    ]
    assert errors[1] < 0.5 * errors[0]


def test_optimal_brain_on_inputs_of_their_own_is_rounding_to_nearest(
    weight: torch.Tensor,
) -> None:
    nearest = round_to_nearest(weight.double(), 4, 32)
    # Nothing goes with anything else, so no weight can make up for another.
    brain = optimal_brain(weight, 4, 32, torch.eye(64))
    assert torch.equal(brain.integers_OI, nearest.integers_OI)
    assert torch.equal(brain.scale_OG, nearest.scale_OG.float())


def test_inputs_that_are_always_silent_do_no_harm(
    weight: torch.Tensor, inputs: torch.Tensor
) -> None:
    inputs[:, 10:20] = 0
    moment = inputs.T @ inputs / len(inputs)
    rounded = optimal_brain(weight, 4, 32, moment).floats()
    assert torch.isfinite(rounded).all()
    assert (rounded - weight).abs().max() < 2 * weight.abs().max()


def test_weights_of_silent_inputs_set_no_range(weight: torch.Tensor, inputs: torch.Tensor) -> None:
    inputs[:, 10:20] = 0
    inputs[:, 32:] = 0
    moment = inputs.T @ inputs / len(inputs)
    plain = optimal_brain(weight, 4, 32, moment)
    large = weight.clone()
    large[:, 10:20] *= 100
    rounded = optimal_brain(large, 4, 32, moment)
    assert torch.equal(rounded.scale_OG, plain.scale_OG)
    assert torch.equal(inputs @ rounded.floats().T, inputs @ plain.floats().T)
    signs = (rounded.floats() * large)[:, 10:20]
    assert (signs >= 0).all() and (signs > 0).float().mean() > 0.9, "clamped to the range, not lost"
    # Where nothing of a group is reached, its own numbers set the range.
    assert torch.equal(
        rounded.integers_OI[:, 32:], round_to_nearest(weight, 4, 32).integers_OI[:, 32:]
    )


def test_two_integers_share_a_byte_the_first_in_the_lower_half() -> None:
    integers = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert packed(integers, 4).tolist() == [[0x21, 0x0F]]
    assert packed(integers, 8) is integers
