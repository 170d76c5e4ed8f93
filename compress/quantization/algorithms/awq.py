"""Channels that are read large scaled up before rounding, so that their weights err less.

After Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration"
(2024). Channels are I and O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.quantization.algorithms.shared_input_layers import families
from compress.quantization.algorithms.weight_rounding import round_to_nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import GraphModule

POWERS = tuple(step / 10 for step in range(1, 11))
WORTH = 0.9
"""Share of the error that may stay where a multiplication has to be inserted."""
SMALLEST = 1e-4


def scale_by_activations_(
    graph: GraphModule,
    moments: Mapping[str, torch.Tensor],
    bits: int,
    group_size: int,
    exclude: Sequence[str] = (),
) -> tuple[dict[str, float], set[str]]:
    """Divide what linear layers read and multiply their weights, in place.

    Args:
        graph: a traced module; it computes what it did.
        moments: tensor that layers read → mean of the products of its channels.
        bits: bits of a weight.
        group_size: inputs that share a scale.
        exclude: patterns of names of modules that stay as they are.

    Returns:
        First module of each family of layers that was scaled → the power of what it reads; and the
        modules whose results have other scales.
    """
    powers, rescaled = {}, set[str]()
    for family in families(graph, exclude):
        weight_OI, moment_II = family.weight_OI(graph), moments[family.source.name]
        if weight_OI.shape[1] % group_size:
            continue

        def rounded(weight_OI: torch.Tensor) -> torch.Tensor:
            return round_to_nearest(weight_OI, bits, group_size).floats()

        worth = 1.0 if family.absorbers(graph) else WORTH
        power = best_power(weight_OI, moment_II.float(), rounded, worth)
        if power:
            rescaled |= family.divide_(graph, scales(moment_II.float(), power))
            powers[family.name] = power
    graph.recompile()
    return powers, rescaled


def scales(moment_II: torch.Tensor, power: float) -> torch.Tensor:
    """Return what each channel is divided by: a power of its root mean square."""
    size_I = moment_II.diagonal().clamp(min=0).sqrt()
    scale_I = (size_I / size_I.max().clamp(min=SMALLEST)).clamp(min=SMALLEST) ** power
    return scale_I / (scale_I.max() * scale_I.min()).sqrt()


def best_power(
    weight_OI: torch.Tensor,
    moment_II: torch.Tensor,
    rounded: Callable[[torch.Tensor], torch.Tensor],
    worth: float,
) -> float:
    """Return the power after which a layer answers nearest, or 0 where none is worth it.

    Args:
        weight_OI: the weight.
        moment_II: mean of the products of what it reads.
        rounded: gives a weight as it will be held.
        worth: share of the plain rounding's error that may stay.
    """

    def error(scale_I: torch.Tensor) -> float:
        off_OI = rounded(weight_OI * scale_I) / scale_I - weight_OI
        return float(((off_OI @ moment_II) * off_OI).sum())

    errors = {power: error(scales(moment_II, power)) for power in POWERS}
    best = min(errors, key=lambda power: errors[power])
    return best if errors[best] < worth * error(torch.ones_like(weight_OI[0])) else 0.0
