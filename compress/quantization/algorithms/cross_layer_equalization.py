"""Cross-layer equalization: neighbouring layers' channels get equal ranges.

After Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (2019),
section 4.1. BatchNorm must have been folded. Letters: O outputs, I inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compress.quantization.algorithms.matmul_view import groups_of
from compress.quantization.pt2e.graph_capture import module_of
from compress.quantization.pt2e.observer_ranges import (
    bias_of,
    layers_of,
    set_bias_,
    set_weight_,
    weight_of,
)
from compress.quantization.pt2e.quantizer import CONVOLUTIONS

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

SWEEPS = 20
"""A layer between two others is changed by both; ranges converge after a few sweeps."""
RELU = torch.ops.aten.relu.default


def equalize_(prepared: GraphModule) -> list[str]:
    """Scale the channels between neighbouring convolutions; return each pair's first module.

    Its outputs have other scales then; the model's stay the same.
    """
    layers = layers_of(prepared)
    pairs: list[tuple[Node, Node]] = []
    for layer in layers:
        before: Any = layer.args[0]
        # Observers may lie between, and a relu, which commutes with a positive scale; relu6 clips
        # at a fixed number.
        while len(before.users) == 1 and (before.op == "call_module" or before.target is RELU):
            before = before.args[0]
        both_convolve = {before.target, layer.target} <= CONVOLUTIONS
        if both_convolve and len(before.users) == 1 and before in layers:
            pairs.append((before, layer))
    for _ in range(SWEEPS):
        for before, after in pairs:
            _equalize_pair_(prepared, before, after)
    return [module_of(before) or before.name for before, _ in pairs]


def _equalize_pair_(prepared: GraphModule, before: Node, after: Node) -> None:
    """Divide a layer's output channels, and multiply the next layer's input channels."""
    weight, next_weight = weight_of(prepared, before), weight_of(prepared, after)
    bias_O = bias_of(prepared, before)
    outputs, inputs = next_weight.shape[:2]
    groups = groups_of(after)
    # Groups by outputs by inputs by kernel positions.
    by_input = next_weight.reshape(groups, outputs // groups, inputs, -1)
    range_O = weight.flatten(1).abs().amax(1)
    next_range_O = by_input.abs().amax((1, 3)).flatten()
    # Makes both ranges their geometric mean; channels that are always 0 or never read stay.
    scale_O = (range_O / next_range_O).sqrt()
    scale_O = scale_O.where((range_O > 0) & (next_range_O > 0), torch.ones(()))
    set_weight_(prepared, before, weight / scale_O.view(-1, *[1] * (weight.dim() - 1)))
    if bias_O is not None:
        set_bias_(prepared, before, bias_O / scale_O)
    scaled = by_input * scale_O.view(by_input.shape[0], 1, by_input.shape[2], 1)
    set_weight_(prepared, after, scaled.reshape(next_weight.shape))
