"""AWQ: scale up input channels with large activations before rounding, so that they err less.

After Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration"
(2024). Channels are I and O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.quantization.algorithms.shared_input_layers import shared_input_groups
from compress.quantization.algorithms.weight_rounding import round_to_nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import GraphModule

EXPONENTS = tuple(step / 10 for step in range(1, 11))
"""Grid of the paper's alpha."""
WORTH = 0.9
"""Largest share of the error that may remain where a multiplication has to be inserted."""
SMALLEST = 1e-4
"""Bound of channels' scales, as in the authors' code."""


def awq_(
    graph: GraphModule,
    second_moments: Mapping[str, torch.Tensor],
    bits: int,
    group_size: int,
    exclude: Sequence[str] = (),
    *,
    symmetric: bool = False,
) -> tuple[dict[str, float], set[str]]:
    """Divide inputs of linear layers and multiply their weights; outputs stay the same.

    `second_moments` are by the name of the tensor that layers read: means of the products of its
    channels. Modules that match `exclude` stay as they are.

    Returns:
        First module of each group of layers that was scaled → the exponent; and the modules whose
        outputs have other scales.
    """
    exponents, rescaled = {}, set[str]()

    def quantized(weight_OI: torch.Tensor) -> torch.Tensor:
        return round_to_nearest(weight_OI, bits, group_size, symmetric=symmetric).dequantize()

    for group in shared_input_groups(graph, exclude):
        weight_OI, moment_II = group.weight_OI(graph), second_moments[group.source.name]
        if weight_OI.shape[1] % group_size:
            continue
        moment_II = moment_II.float()
        worth = 1.0 if group.absorbers(graph) else WORTH
        exponent = best_exponent(weight_OI, moment_II, quantized, worth)
        if exponent:
            rescaled |= group.divide_input_(graph, channel_scales(moment_II, exponent))
            exponents[group.name] = exponent
    graph.recompile()
    return exponents, rescaled


def channel_scales(moment_II: torch.Tensor, exponent: float) -> torch.Tensor:
    """Return what each channel is divided by: a power of its root mean square."""
    rms_I = moment_II.diagonal().clamp(min=0).sqrt()
    scale_I = (rms_I / rms_I.max().clamp(min=SMALLEST)).clamp(min=SMALLEST) ** exponent
    # Normalized as in the authors' code.
    return scale_I / (scale_I.max() * scale_I.min()).sqrt()


def best_exponent(
    weight_OI: torch.Tensor,
    moment_II: torch.Tensor,
    quantized: Callable[[torch.Tensor], torch.Tensor],
    worth: float,
) -> float:
    """Return the exponent with the least output error, or 0 where none is worth it.

    `quantized` quantizes and dequantizes a weight; of the error of plain rounding the share `worth`
    may remain.
    """

    def output_error(scale_I: torch.Tensor) -> float:
        # The moments of the inputs replace the samples: errors are a quadratic form of the weights.
        error_OI = quantized(weight_OI * scale_I) / scale_I - weight_OI
        return float(((error_OI @ moment_II) * error_OI).sum())

    errors = {e: output_error(channel_scales(moment_II, e)) for e in EXPONENTS}
    best = min(errors, key=lambda exponent: errors[exponent])
    return best if errors[best] < worth * output_error(torch.ones_like(weight_OI[0])) else 0.0
