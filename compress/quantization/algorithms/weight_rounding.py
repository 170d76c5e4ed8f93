"""Group-wise weight quantization: round to nearest, HQQ and GPTQ.

A weight is a float32 matrix of outputs by inputs (OI); G counts groups along the inputs, S the
inputs of one group (``group_size``), which share a scale and a zero point and divide the inputs.
Integers q of at most 8 bits stand for ``(q - zero_OG) * scale_OG``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from compress.graph.layer_gram import compensate, hessian_factor

SMALLEST_SCALE = 2.0**-60  # scale of a group of zeros; far above what would vanish in a float32
HQQ_STEPS = 20
HQQ_NORM = 0.7  # the paper's p < 1, which makes the error sparse
HQQ_BETA = 10.0
"""Penalty of the half-quadratic split; it grows by HQQ_KAPPA in each step. The values of the
authors' code."""
HQQ_KAPPA = 1.01
RANGE_SHARES = tuple(1 - step / 40 for step in range(13))
"""Shares of a group's range that `gptq` tries: 1 to 0.7. The more a range is clipped, the finer are
its steps."""

LARGEST_PART = 2**22
"""Numbers of a weight that are quantized at once: each temporary tensor has as many float64."""


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as small unsigned integers, with scale and zero point of each group."""

    integers_OI: torch.Tensor  # noqa: N815 - the letters name the axes
    """uint8, of which ``bits`` are used."""
    scale_OG: torch.Tensor  # noqa: N815
    """float32."""
    zero_OG: torch.Tensor  # noqa: N815
    """uint8, or float32 from HQQ."""
    bits: int

    def dequantize(self) -> torch.Tensor:
        """Return the weight that the integers stand for, O by I."""
        grouped_OGS = grouped(self.integers_OI, self.scale_OG.shape[1]).float()
        return ((grouped_OGS - self.zero_OG[..., None]) * self.scale_OG[..., None]).flatten(1)


def grouped(weight_OI: torch.Tensor, groups: int) -> torch.Tensor:
    """Return a weight as outputs by groups by inputs of a group."""
    return weight_OI.view(len(weight_OI), groups, -1)


def in_parts(
    quantize: Callable[..., QuantizedWeight], weight_OI: torch.Tensor, *sizes: int, **options: bool
) -> QuantizedWeight:
    """Quantize some outputs at a time, as none depends on another, so that memory stays flat."""
    rows = max(1, LARGEST_PART // weight_OI.shape[1])
    parts = [quantize(part_OI, *sizes, **options) for part_OI in torch.split(weight_OI, rows)]
    if len(parts) == 1:
        return parts[0]
    return QuantizedWeight(
        torch.cat([part.integers_OI for part in parts]),
        torch.cat([part.scale_OG for part in parts]),
        torch.cat([part.zero_OG for part in parts]),
        parts[0].bits,
    )


def round_to_nearest(
    weight_OI: torch.Tensor, bits: int, group_size: int, *, symmetric: bool = False
) -> QuantizedWeight:
    """Round each weight to the nearest of `2**bits` steps between its group's extremes and 0."""
    grouped_OGS = grouped(weight_OI, weight_OI.shape[1] // group_size)
    scale_OG, zero_OG = _qparams(grouped_OGS, bits, symmetric)
    integers_OGS = _quantize(grouped_OGS, scale_OG[..., None], zero_OG[..., None], bits)
    return QuantizedWeight(integers_OGS.flatten(1), scale_OG, zero_OG.to(torch.uint8), bits)


def hqq(weight_OI: torch.Tensor, bits: int, group_size: int) -> QuantizedWeight:
    """Fit each group's zero point to an error norm in which few large errors count less.

    After Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023):
    in turn, the sparse part of the error (soft threshold of the norm ``HQQ_NORM``) and the zero
    point that fits the rest.
    """
    weight_OGS = grouped(weight_OI, weight_OI.shape[1] // group_size)
    scale_OG, zero_OG = _qparams(weight_OGS, bits)
    scale, zero, beta = scale_OG[..., None], zero_OG[..., None], HQQ_BETA

    def norm_of_error(zero: torch.Tensor) -> torch.Tensor:
        integers = _quantize(weight_OGS, scale, zero, bits).float()
        error = (weight_OGS - (integers - zero) * scale).abs()
        return error.pow(HQQ_NORM).mean(-1, keepdim=True)

    best, best_error = zero, norm_of_error(zero)
    for _ in range(HQQ_STEPS):
        integers = _quantize(weight_OGS, scale, zero, bits).float()
        error = weight_OGS - (integers - zero) * scale
        # The generalized soft threshold of the norm keeps the large errors, shrunk.
        threshold = error.abs().clamp(min=1e-8).pow(HQQ_NORM - 1) / beta
        sparse = error.sign() * (error.abs() - threshold).clamp(min=0)
        zero = (integers - (weight_OGS - sparse) / scale).mean(-1, keepdim=True)
        beta *= HQQ_KAPPA
        error = norm_of_error(zero)
        # A step need not lower the norm, so the best zero points so far are kept.
        better = error < best_error
        best, best_error = torch.where(better, zero, best), torch.where(better, error, best_error)
    integers_OGS = _quantize(weight_OGS, scale, best, bits)
    return QuantizedWeight(integers_OGS.flatten(1), scale_OG, best.squeeze(-1).contiguous(), bits)


def gptq(
    weight_OI: torch.Tensor,
    bits: int,
    group_size: int,
    second_moment_II: torch.Tensor,
    *,
    symmetric: bool = False,
) -> QuantizedWeight:
    """Round input after input, and let the remaining inputs compensate each one's error.

    After Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
    Transformers" (2023); inputs of large second moment come first, as with `act_order` in the
    authors' code, and scales are fixed before. The second moment is the mean of the products of the
    layer's inputs.
    """
    moment_II = second_moment_II.double()
    order_I = moment_II.diagonal().argsort(descending=True, stable=True)
    factor_II = hessian_factor(moment_II[order_I[:, None], order_I])

    def quantize(weight_OI: torch.Tensor) -> QuantizedWeight:
        weight_OI = weight_OI.double()
        grouped_OGS = grouped(weight_OI, weight_OI.shape[1] // group_size)
        scale_OG, zero_OG = _least_error_qparams(grouped_OGS, moment_II.diagonal(), bits, symmetric)
        integers_OI = torch.empty_like(weight_OI, dtype=torch.uint8)
        places = order_I.tolist()

        def round_input(step: int, rest_OL: torch.Tensor) -> torch.Tensor:
            group = places[step] // group_size
            scale_O, zero_O = scale_OG[:, group], zero_OG[:, group]
            integers_O = _quantize(rest_OL[:, 0], scale_O, zero_O, bits)
            integers_OI[:, places[step]] = integers_O
            return (integers_O.double() - zero_O) * scale_O

        compensate(weight_OI[:, order_I], factor_II, round_input)
        return QuantizedWeight(integers_OI, scale_OG.float(), zero_OG.to(torch.uint8), bits)

    return in_parts(quantize, weight_OI)


def _least_error_qparams(
    weight_OGS: torch.Tensor, moment_I: torch.Tensor, bits: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and zero points of the ranges with the least error of the outputs.

    Ranges from the extremes down to a share of them are tried; the squared error of each weight
    counts as much as the mean square of what it is multiplied with.
    """
    moment_GS = moment_I.view(1, *weight_OGS.shape[1:])
    # Inputs that are 0 in every sample set no group's range: their weights are clamped to the range
    # of the others, where the paper's code sets them to 0. A group without any live input costs
    # nothing on the samples: it keeps its own range.
    is_dead = (moment_GS == 0) & (moment_GS != 0).any(-1, keepdim=True)
    weight_OGS = weight_OGS.masked_fill(is_dead, 0)
    best_OG, scale_OG, zero_OG = torch.tensor(torch.inf), torch.tensor(0), torch.tensor(0)
    for share in RANGE_SHARES:
        scale, zero = _qparams(weight_OGS * share, bits, symmetric)
        integers_OGS = _quantize(weight_OGS, scale[..., None], zero[..., None], bits)
        off_OGS = (integers_OGS - zero[..., None]) * scale[..., None] - weight_OGS
        error_OG = (off_OGS.square() * moment_GS).sum(-1)
        is_better = error_OG < best_OG
        best_OG = torch.where(is_better, error_OG, best_OG)
        scale_OG = torch.where(is_better, scale, scale_OG)
        zero_OG = torch.where(is_better, zero, zero_OG)
    return scale_OG, zero_OG


def pack(integers_OI: torch.Tensor, bits: int) -> torch.Tensor:
    """Return integers as bytes; of two 4-bit ones in a byte the first takes the lower half."""
    if bits == 8:
        return integers_OI
    return integers_OI[..., ::2] | (integers_OI[..., 1::2] << 4)


def _qparams(
    grouped_OGS: torch.Tensor, bits: int, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of each group, whose range includes 0."""
    low = grouped_OGS.amin(-1).clamp(max=0)
    high = grouped_OGS.amax(-1).clamp(min=0)
    if symmetric:
        middle = 2 ** (bits - 1)
        scale = torch.maximum(-low / middle, high / (middle - 1)).clamp(min=SMALLEST_SCALE)
        return scale, torch.full_like(scale, middle)
    scale = ((high - low) / (2**bits - 1)).clamp(min=SMALLEST_SCALE)
    return scale, (-low / scale).round()


def _quantize(
    values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int
) -> torch.Tensor:
    return (values / scale + zero).round().clamp(0, 2**bits - 1).to(torch.uint8)
