"""How a weight becomes a few bits: groups of inputs, each with a scale and a zero point.

A weight is a matrix of outputs by inputs (OI); G counts groups along the inputs, S the inputs in
one. The number that integers q stand for is ``(q - zero_OG) * scale_OG``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compress.graph.layer_gram import inverse_hessian_factor

SMALLEST_SCALE = 2.0**-60
"""Scale of a group of zeros; far above what would vanish in a float32."""
HQQ_STEPS = 20
HQQ_NORM = 0.7
HQQ_STIFFNESS = 10.0
HQQ_STIFFENING = 1.01


@dataclass(frozen=True)
class Rounded:
    """A weight in groups of small unsigned integers."""

    integers_OI: torch.Tensor  # noqa: N815 - the letters name the axes
    """uint8, of which ``bits`` are used."""
    scale_OG: torch.Tensor  # noqa: N815
    """float32."""
    zero_OG: torch.Tensor  # noqa: N815
    """uint8, or float32 where a method fits it."""
    bits: int

    def floats(self) -> torch.Tensor:
        """Return the weight that the integers stand for, O by I."""
        in_groups_OGS = grouped(self.integers_OI, self.scale_OG.shape[1]).float()
        return ((in_groups_OGS - self.zero_OG[..., None]) * self.scale_OG[..., None]).flatten(1)


def grouped(weight_OI: torch.Tensor, groups: int) -> torch.Tensor:
    """Return a weight as outputs by groups by inputs of a group."""
    return weight_OI.view(len(weight_OI), groups, -1)


def round_to_nearest(weight_OI: torch.Tensor, bits: int, group_size: int) -> Rounded:
    """Round each number to the nearest step between its group's extremes, zero being one of them.

    Args:
        weight_OI: a float32 weight; the inputs are a multiple of ``group_size``.
        bits: bits of an integer, at most 8.
        group_size: inputs that share a scale and a zero point.
    """
    in_groups_OGS = grouped(weight_OI, weight_OI.shape[1] // group_size)
    scale_OG, zero_OG = _range(in_groups_OGS, bits)
    rounded = _integers(in_groups_OGS, scale_OG[..., None], zero_OG[..., None], bits)
    return Rounded(rounded.flatten(1), scale_OG, zero_OG.to(torch.uint8), bits)


def hqq(weight_OI: torch.Tensor, bits: int, group_size: int) -> Rounded:
    """Fit each group's zero point so that the few large errors of a rounding do not rule it.

    After Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023):
    the error is split into a sparse part, shrunk by the norm ``HQQ_NORM``, and a zero point.

    Args:
        weight_OI: a float32 weight; the inputs are a multiple of ``group_size``.
        bits: bits of an integer, at most 8.
        group_size: inputs that share a scale and a zero point.
    """
    in_groups_OGS = grouped(weight_OI, weight_OI.shape[1] // group_size)
    scale_OG, zero_OG = _range(in_groups_OGS, bits)
    scale, zero, stiffness = scale_OG[..., None], zero_OG[..., None], HQQ_STIFFNESS
    best, best_error = zero, _error(in_groups_OGS, scale, zero, bits)
    for _ in range(HQQ_STEPS):
        integers = _integers(in_groups_OGS, scale, zero, bits).float()
        sparse = _shrunk(in_groups_OGS - (integers - zero) * scale, stiffness)
        zero = (integers - (in_groups_OGS - sparse) / scale).mean(-1, keepdim=True)
        stiffness *= HQQ_STIFFENING
        error = _error(in_groups_OGS, scale, zero, bits)
        better = error < best_error
        best, best_error = torch.where(better, zero, best), torch.where(better, error, best_error)
    rounded = _integers(in_groups_OGS, scale, best, bits)
    return Rounded(rounded.flatten(1), scale_OG, best.squeeze(-1).contiguous(), bits)


def gptq(
    weight_OI: torch.Tensor, bits: int, group_size: int, second_moment_II: torch.Tensor
) -> Rounded:
    """Round input after input, and let the inputs to come make up for each one's error.

    After Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
    Transformers" (2023). Inputs that are 0 in every sample set no group's range: their weights are
    clamped to the range of the others, where the paper's code sets them to 0.

    Args:
        weight_OI: a float32 weight; the inputs are a multiple of ``group_size``.
        bits: bits of an integer, at most 8.
        group_size: inputs that share a scale and a zero point.
        second_moment_II: mean of the products of the layer's inputs.
    """
    left_OI = weight_OI.double().clone()
    update_II = inverse_hessian_factor(second_moment_II.double())
    dead_I = second_moment_II.diagonal() == 0
    scales, zeros, columns = [], [], []
    for i in range(left_OI.shape[1]):
        if i % group_size == 0:
            group_OS, dead_S = left_OI[:, i : i + group_size], dead_I[i : i + group_size]
            # A group without any live input costs nothing on the samples: it keeps its own range.
            ranged_OS = group_OS if dead_S.all() else group_OS[:, ~dead_S]
            scale_O1, zero_O1 = _range(ranged_OS[:, None], bits)
            scales.append(scale_O1)
            zeros.append(zero_O1)
        scale_O, zero_O = scales[-1][:, 0], zeros[-1][:, 0]
        integers_O = _integers(left_OI[:, i], scale_O, zero_O, bits)
        rounded_O = (integers_O.double() - zero_O) * scale_O
        error_O = (left_OI[:, i] - rounded_O) / update_II[i, i]
        left_OI[:, i + 1 :] -= error_O[:, None] * update_II[i, i + 1 :]
        columns.append(integers_O)
    scale_OG, zero_OG = torch.cat(scales, 1).float(), torch.cat(zeros, 1).to(torch.uint8)
    return Rounded(torch.stack(columns, 1), scale_OG, zero_OG, bits)


def packed(integers_OI: torch.Tensor, bits: int) -> torch.Tensor:
    """Return integers as bytes; of two that share one the first takes the lower half."""
    if bits == 8:
        return integers_OI
    return integers_OI[:, ::2] | (integers_OI[:, 1::2] << 4)


def _range(in_groups_OGS: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    low = in_groups_OGS.amin(-1).clamp(max=0)
    high = in_groups_OGS.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).clamp(min=SMALLEST_SCALE)
    return scale, (-low / scale).round()


def _integers(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int
) -> torch.Tensor:
    return (values / scale + zero).round().clamp(0, 2**bits - 1).to(torch.uint8)


def _error(
    in_groups_OGS: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int
) -> torch.Tensor:
    integers = _integers(in_groups_OGS, scale, zero, bits).float()
    error = (in_groups_OGS - (integers - zero) * scale).abs()
    return error.pow(HQQ_NORM).mean(-1, keepdim=True)


def _shrunk(error: torch.Tensor, stiffness: float) -> torch.Tensor:
    """Return the errors that are large, made smaller: the generalized soft threshold."""
    size = error.abs()
    threshold = size.clamp(min=1e-8).pow(HQQ_NORM - 1) / stiffness
    return error.sign() * (size - threshold).clamp(min=0)
