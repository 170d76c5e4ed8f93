"""Bias correction: biases that undo the shift of a layer's mean output by quantization.

After Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (2019),
section 4.2, with the means measured on samples.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from compress.quantization.pt2e.observer_ranges import (
    bias_of,
    set_bias_,
    weight_observer_of,
    weight_of,
)
from compress.quantization.pt2e.partial_graph import fake_quantize
from compress.quantization.pt2e.quantizer import LINEAR

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compress.quantization.algorithms.matmul_view import InputPairs


def correct_bias_(
    prepared: GraphModule, layer: Node, weight: torch.Tensor, pairs: InputPairs
) -> None:
    """Shift a layer's bias, if it has one, so that its mean output is the float model's.

    `prepared` has calibrated observers; `weight` is the layer's in the float model.
    """
    bias_O = bias_of(prepared, layer)
    if bias_O is None:
        return
    operator: Any = layer.target
    quantized = fake_quantize(weight_observer_of(prepared, layer), weight_of(prepared, layer))
    shift_O, count = torch.zeros_like(bias_O, dtype=torch.float64), 0
    for float_input, quantized_input in pairs:
        expected = operator(float_input, weight, None, *layer.args[3:])
        shift = expected - operator(quantized_input, quantized, None, *layer.args[3:])
        by_channel = shift.movedim(-1 if layer.target is LINEAR else 1, 0).flatten(1)
        shift_O += by_channel.double().sum(1)  # float32 would lose digits over many rows
        count += by_channel.shape[1]
    set_bias_(prepared, layer, bias_O + (shift_O / count).to(bias_O.dtype))
