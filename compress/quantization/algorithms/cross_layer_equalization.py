"""Channels of neighbouring layers brought to one range, which a scale for all of them serves.

After Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (2019),
section 4.1. BatchNorm must have been folded. Letters: O outputs, I inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compress.quantization.algorithms.matmul_view import groups_of
from compress.quantization.pt2e.module_names import module_of
from compress.quantization.pt2e.observed_layers import (
    bias_of,
    layers_of,
    put_bias_,
    put_weight_,
    weight_of,
)
from compress.quantization.pt2e.quantizer import CONVOLUTIONS

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

SWEEPS = 20
"""A layer between two others is changed by both; ranges settle after a few sweeps."""
RELU = torch.ops.aten.relu.default


def equalize_(prepared: GraphModule) -> list[str]:
    """Scale the channels between neighbouring convolutions, in place; the answers stay.

    Between them only a relu may lie, which a positive scale passes through; relu6 cuts at a fixed
    number, and layers around it are left alone.

    Returns:
        The first module of each pair: its results have other scales.
    """
    layers = layers_of(prepared)
    found = [(_before(layer), layer) for layer in layers if layer.target in CONVOLUTIONS]
    pairs = [(first, second) for first, second in found if first in layers]
    for _ in range(SWEEPS):
        for first, second in pairs:
            _equalize_pair_(prepared, first, second)
    return [module_of(first) or first.name for first, _ in pairs]


def _before(layer: Node) -> Any:
    """Return the convolution whose channels a layer alone reads, directly or through a relu."""
    found: Any = layer.args[0]
    while found.op == "call_module" or found.target is RELU:
        if len(found.users) > 1:
            return None
        found = found.args[0]
    return found if found.target in CONVOLUTIONS and len(found.users) == 1 else None


def _equalize_pair_(prepared: GraphModule, first: Node, second: Node) -> None:
    weight, next_weight = weight_of(prepared, first), weight_of(prepared, second)
    bias_O = bias_of(prepared, first)
    by_input = _grouped_by_input(next_weight, groups_of(second))
    made_O = weight.flatten(1).abs().amax(1)
    read_O = by_input.abs().amax((1, 3)).flatten()
    scale_O = (made_O / read_O).sqrt().where((made_O > 0) & (read_O > 0), torch.ones(()))
    put_weight_(prepared, first, weight / scale_O.view(-1, *[1] * (weight.dim() - 1)))
    if bias_O is not None:
        put_bias_(prepared, first, bias_O / scale_O)
    scaled = by_input * scale_O.view(by_input.shape[0], 1, by_input.shape[2], 1)
    put_weight_(prepared, second, scaled.reshape(next_weight.shape))


def _grouped_by_input(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Return a weight as groups by outputs by inputs by places of the kernel."""
    outputs, inputs = weight.shape[:2]
    return weight.reshape(groups, outputs // groups, inputs, -1)
