import numpy as np
import pytest
import torch

from compress.quantization.algorithms.weight_rounding import (
    gptq,
    grouped,
    hqq,
    pack,
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


def affine(group: np.ndarray, bits: int) -> tuple[float, float, np.ndarray]:
    """Return scale, zero point and integers of one group, as ONNX's DynamicQuantizeLinear."""
    top = 2**bits - 1
    low, high = min(0.0, group.min()), max(0.0, group.max())
    scale = max((high - low) / top, 2.0**-60)
    zero = np.clip(np.round(-low / scale), 0, top)
    return scale, zero, np.clip(np.round(group / scale + zero), 0, top)


def unlike_groups() -> torch.Tensor:
    """Return a float64 weight with groups of 8 that lie about 0, above it, below it, and at it."""
    drawn = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 32)))
    return drawn * torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat_interleave(8) + torch.tensor(
        [0.3, 6.0, -6.0, 0.0]
    ).repeat_interleave(8)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_to_nearest_is_the_affine_grid_whose_range_holds_zero(bits: int) -> None:
    weight = unlike_groups()
    found = round_to_nearest(weight, bits, 8)
    for o, g in np.ndindex(4, 4):
        scale, zero, integers = affine(weight[o, 8 * g : 8 * g + 8].numpy(), bits)
        assert float(found.scale_OG[o, g]) == scale
        assert float(found.zero_OG[o, g]) == zero
        assert found.integers_OI[o, 8 * g : 8 * g + 8].tolist() == integers.tolist()
        floats = found.dequantize()[o, 8 * g : 8 * g + 8]
        assert floats.tolist() == ((integers - zero) * scale).tolist()
    assert found.integers_OI.dtype == found.zero_OG.dtype == torch.uint8
    assert found.bits == bits


@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_rounding_has_its_zero_in_the_middle_and_clips_nothing(bits: int) -> None:
    weight, middle = unlike_groups(), 2 ** (bits - 1)
    found = round_to_nearest(weight, bits, 8, symmetric=True)
    assert found.zero_OG.unique().tolist() == [middle]
    error = (found.dequantize() - weight).abs().view(4, 4, 8)
    assert (error <= found.scale_OG[..., None] / 2 * (1 + 1e-6)).all()
    # Each group but the zeros reaches one end of the integers.
    reached = found.integers_OI.view(4, 4, 8)
    assert ((reached.amin(-1) == 0) | (reached.amax(-1) == 2**bits - 1))[:, :3].all()
    fitted = gptq(weight, bits, 8, torch.eye(32).double(), symmetric=True)
    assert fitted.zero_OG.unique().tolist() == [middle]


def test_hqq_is_the_papers_proximal_iteration() -> None:
    """Each step shrinks the error (the paper's equation 4) and fits the zero point to the rest."""
    weight = unlike_groups() * (1 + 4 * (torch.arange(32) % 8 == 5))
    found = hqq(weight, 4, 8)
    moved = 0
    for o, g in np.ndindex(4, 4):
        group = weight[o, 8 * g : 8 * g + 8].numpy()
        scale, start, _ = affine(group, 4)

        def integers(zero: float) -> np.ndarray:
            return np.clip(np.round(group / scale + zero), 0, 15)  # noqa: B023 - used at once

        def error(zero: float) -> float:
            return (np.abs(group - (integers(zero) - zero) * scale) ** 0.7).mean()  # noqa: B023

        zero = best = start
        for step in range(20):
            beta, near = 10 * 1.01**step, integers(zero)
            off = group - (near - zero) * scale
            least = np.maximum(np.abs(off), 1e-8)
            shrunk = np.sign(off) * np.maximum(np.abs(off) - least**-0.3 / beta, 0)
            zero = (near - (group - shrunk) / scale).mean()
            best = zero if error(zero) < error(best) else best
        assert float(found.zero_OG[o, g]) == pytest.approx(best, rel=1e-9)
        assert float(found.scale_OG[o, g]) == scale
        assert found.integers_OI[o, 8 * g : 8 * g + 8].tolist() == integers(best).tolist()
        moved += best != start
    assert moved > 8 and found.bits == 4


def test_gptq_matches_the_update_with_the_inverse_hessian_of_the_remaining_inputs(
    weight: torch.Tensor, inputs: torch.Tensor
) -> None:
    """GPTQ's equations 2 and 3, the Hessian of the inputs to come inverted anew at each."""
    moment = (inputs.T @ inputs / len(inputs)).double()
    dead = [7, 40, 41]
    moment[dead], moment[:, dead] = 0, 0
    energy = moment.diagonal().numpy()
    grids = [
        [least_error_grid(row[g : g + 32], energy[g : g + 32]) for row in weight.double().numpy()]
        for g in (0, 32)
    ]
    hessian = moment.numpy() + 0.01 * energy.mean() * np.eye(64)
    hessian[dead, dead] = 1
    left, expected = weight.double().numpy().copy(), np.zeros((24, 64))
    to_come = sorted(range(64), key=lambda i: -energy[i])
    while to_come:
        i = to_come[0]
        inverse = np.linalg.inv(hessian[np.ix_(to_come, to_come)])
        for row, into, (scale, zero) in zip(left, expected, grids[i // 32], strict=True):
            into[i] = np.clip(np.round(row[i] / scale + zero), 0, 15)
            off = (row[i] - (into[i] - zero) * scale) / inverse[0, 0]
            row[to_come] -= off * inverse[0]
        del to_come[0]
    found = gptq(weight, 4, 32, moment)
    assert found.integers_OI.tolist() == expected.tolist() and found.bits == 4


def least_error_grid(group: np.ndarray, energy: np.ndarray) -> tuple[float, float]:
    """Return the scale and zero point, of 13 ranges, with the least error on live inputs."""
    live, errors = group[energy > 0], {}
    for share in np.linspace(1, 0.7, 13):
        scale, zero, _ = affine(share * live, 4)
        off = (np.clip(np.round(live / scale + zero), 0, 15) - zero) * scale - live
        errors[scale, zero] = (off**2 * energy[energy > 0]).sum()
    return min(errors, key=lambda grid: errors[grid])


@pytest.mark.parametrize("bits", [4, 8])
def test_no_number_is_further_off_than_half_a_step(weight: torch.Tensor, bits: int) -> None:
    rounded = round_to_nearest(weight, bits, 16)
    off_OGS = grouped((rounded.dequantize() - weight).abs(), 4)
    # Where the zero point was rounded, the outermost numbers lie up to a whole step off.
    assert (off_OGS <= rounded.scale_OG[..., None] * 1.001).all()
    inner = (rounded.integers_OI > 0) & (rounded.integers_OI < 2**bits - 1)
    assert (off_OGS <= rounded.scale_OG[..., None] * 0.501)[grouped(inner, 4)].all()
    assert off_OGS.max() > 0


def test_zero_stays_zero(weight: torch.Tensor) -> None:
    weight[:, 3] = 0
    weight[5] = 0
    for rounded in (round_to_nearest(weight, 4, 32),):
        assert (rounded.dequantize()[:, 3] == 0).all()
        assert (rounded.dequantize()[5] == 0).all()


def test_hqq_errs_less_where_few_weights_are_large(weight: torch.Tensor) -> None:
    nearest, fitted = (f(weight, 4, 32).dequantize() for f in (round_to_nearest, hqq))
    norm = lambda found: (found - weight).abs().pow(0.7).mean()  # noqa: E731
    assert norm(fitted) < norm(nearest)
    zero_OG = hqq(weight, 4, 32).zero_OG
    assert not torch.equal(zero_OG, zero_OG.round())


def test_gptq_errs_less_on_its_inputs(weight: torch.Tensor, inputs: torch.Tensor) -> None:
    moment = inputs.T @ inputs / len(inputs)
    expected = inputs @ weight.T
    errors = [
        float((inputs @ rounded.dequantize().T - expected).norm() / expected.norm())
        for rounded in (
            round_to_nearest(weight, 4, 32),
            gptq(weight, 4, 32, moment),
        )
    ]
    assert errors[1] < 0.5 * errors[0]


def test_gptq_on_uncorrelated_inputs_is_rounding_to_nearest(
    weight: torch.Tensor,
) -> None:
    # Nothing goes with anything else, so no weight can make up for another.
    found = gptq(weight, 4, 32, torch.eye(64))
    steps_OGS = grouped(weight, 2) / found.scale_OG[..., None] + found.zero_OG[..., None]
    assert torch.equal(grouped(found.integers_OI, 2), steps_OGS.round().clamp(0, 15).byte())
    # Of normal numbers it pays to clip the outermost.
    nearest = round_to_nearest(weight, 4, 32)
    assert (found.scale_OG <= 1.00001 * nearest.scale_OG).all()
    assert (found.dequantize() - weight).norm() < 0.97 * (nearest.dequantize() - weight).norm()


def test_gptq_accepts_inputs_that_are_always_zero(
    weight: torch.Tensor, inputs: torch.Tensor
) -> None:
    inputs[:, 10:20] = 0
    moment = inputs.T @ inputs / len(inputs)
    rounded = gptq(weight, 4, 32, moment).dequantize()
    assert torch.isfinite(rounded).all()
    assert (rounded - weight).abs().max() < 2 * weight.abs().max()


def test_weights_of_zero_inputs_set_no_range(weight: torch.Tensor, inputs: torch.Tensor) -> None:
    inputs[:, 10:20] = 0
    inputs[:, 32:] = 0
    moment = inputs.T @ inputs / len(inputs)
    plain = gptq(weight, 4, 32, moment)
    large = weight.clone()
    large[:, 10:20] *= 100
    rounded = gptq(large, 4, 32, moment)
    assert torch.equal(rounded.scale_OG, plain.scale_OG)
    assert torch.equal(inputs @ rounded.dequantize().T, inputs @ plain.dequantize().T)
    signs = (rounded.dequantize() * large)[:, 10:20]
    assert (signs >= 0).all() and (signs > 0).float().mean() > 0.9, "clamped to the range, not lost"
    # Where nothing of a group is reached, its own numbers set the range.
    assert torch.equal(
        rounded.integers_OI[:, 32:], round_to_nearest(weight, 4, 32).integers_OI[:, 32:]
    )


def test_two_integers_share_a_byte_the_first_in_the_lower_half() -> None:
    integers = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack(integers, 4).tolist() == [[0x21, 0x0F]]
    assert pack(integers, 8) is integers
