"""Biases that take back the shift of a layer's mean answers which rounding brought.

After Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (2019),
section 4.2, with the means found on samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compress.quantization.pt2e.observed_layers import (
    bias_of,
    put_bias_,
    weight_observer_of,
    weight_of,
)
from compress.quantization.pt2e.partial_graph import fake_rounded
from compress.quantization.pt2e.quantizer import LINEAR

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compress.quantization.algorithms.matmul_view import Pairs


def correct_bias_(prepared: GraphModule, layer: Node, weight: torch.Tensor, pairs: Pairs) -> None:
    """Move a layer's bias so that its mean answers are the float model's, in place.

    Args:
        prepared: a graph whose observers know their ranges.
        layer: a layer of it; one without bias stays as it is.
        weight: its weight in the float model.
        pairs: what the layer reads.
    """
    bias_O = bias_of(prepared, layer)
    if bias_O is None:
        return
    rounded_weight = fake_rounded(weight_observer_of(prepared, layer), weight_of(prepared, layer))
    shift_O, count = torch.zeros_like(bias_O, dtype=torch.float64), 0
    for floats, rounded in pairs:
        shift = _answers(layer, floats, weight) - _answers(layer, rounded, rounded_weight)
        by_channel = shift.movedim(-1 if layer.target is LINEAR else 1, 0).flatten(1)
        shift_O += by_channel.double().sum(1)
        count += by_channel.shape[1]
    put_bias_(prepared, layer, bias_O + (shift_O / count).to(bias_O.dtype))


def _answers(layer: Node, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    operator: Any = layer.target
    answers: torch.Tensor = operator(values, weight, None, *layer.args[3:])
    return answers
