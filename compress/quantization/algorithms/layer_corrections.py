"""AdaRound and bias correction, layer after layer on a calibrated graph.

AdaRound rounds each weight up or down so that its layer's output stays, not the weight itself:
Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization" (2020), section 3.4.
The choice is relaxed to a number between 0 and 1, which a growing penalty drives to either. Biases
undo the shift of a layer's mean output: Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction" (2019), section 4.2, with the means measured on samples. Letters: G groups, O outputs and I inputs of a group.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from compress.quantization.algorithms.matmul_view import InputMoments, weight_matrix
from compress.quantization.pt2e.observer_ranges import (
    bias_of,
    set_bias_,
    set_weight_,
    weight_observer_of,
    weight_of,
)
from compress.quantization.pt2e.partial_graph import fake_quantize
from compress.quantization.pt2e.quantizer import LINEAR

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compress.quantization.algorithms.matmul_view import InputPairs


ZETA, GAMMA = 1.1, -0.1
"""Stretch of the sigmoid, so that it reaches 0 and 1 (equation 23)."""
FIRST_POWER, LAST_POWER = 20.0, 2.0
"""Annealed exponent of the penalty: while it is high, values far from 0 and 1 move freely."""
PENALTY = 5.0
"""Weight of the penalty, where rounding to nearest has the mean squared error 1 per weight."""
WARM_UP = 0.2
"""Share of the steps without penalty."""
LEARNING_RATE = 0.1


def adaround_(prepared: GraphModule, layer: Node, pairs: InputPairs, steps: int) -> float:
    """Round a layer's weight adaptively in a calibrated graph; return the share not to nearest."""
    weight, observer = weight_of(prepared, layer), weight_observer_of(prepared, layer)
    scale_O, _ = observer.calculate_qparams()
    weight_GOI = weight_matrix(layer, weight)
    scale_GO1 = scale_O.view(*weight_GOI.shape[:2], 1)
    moments = InputMoments.from_pairs(pairs, layer, weight.shape[2:])
    limits = observer.quant_min, observer.quant_max
    integers_GOI = round_adaptively(weight_GOI, scale_GO1, limits, moments, steps)
    # Conversion rounds these values to nearest, which gives the same integers.
    set_weight_(prepared, layer, (integers_GOI * scale_GO1).reshape(weight.shape))
    nearest_GOI = (weight_GOI / scale_GO1).round().clamp(*limits)
    return float((integers_GOI != nearest_GOI).float().mean())


def round_adaptively(
    weight_GOI: torch.Tensor,
    scale_GO1: torch.Tensor,
    limits: tuple[int, int],
    moments: InputMoments,
    steps: int,
) -> torch.Tensor:
    """Return the integers, within limits, with which a layer's output is nearest to the float one.

    The squared error of the output is a quadratic form of the weights, so the second moments of the
    inputs replace the samples.
    """
    exact_GOI = weight_GOI / scale_GO1
    floor_GOI = exact_GOI.floor()
    hessian_GII = moments.yy_GII.float()
    slope_GOI = exact_GOI @ (moments.yy_GII - moments.xy_GII).float()
    # Errors are relative to the mean squared error per weight of rounding to nearest.
    nearest_GOI = exact_GOI.round() - exact_GOI
    nearest_error_GO1 = ((nearest_GOI @ hessian_GII) * nearest_GOI).mean(-1, keepdim=True)
    nearest_error_GO1 = nearest_error_GO1.clamp(min=1e-12)  # it is 0 where inputs are
    # V of the paper, whose rectified sigmoid is the share by which a weight is rounded up.
    v_GOI = _inverse_sigmoid(exact_GOI - floor_GOI).requires_grad_()
    optimizer = torch.optim.Adam([v_GOI], lr=LEARNING_RATE)
    for step in range(steps):
        share_GOI = _rectified_sigmoid(v_GOI.detach())
        sigmoid_GOI = v_GOI.detach().sigmoid()
        error_GOI = (floor_GOI + share_GOI).clamp(*limits) - exact_GOI
        gradient_GOI = 2 * (error_GOI @ hessian_GII + slope_GOI) / nearest_error_GO1
        gradient_GOI = gradient_GOI + _penalty_gradient(share_GOI, step / steps)
        inside_GOI = (share_GOI > 0) & (share_GOI < 1)
        v_GOI.grad = gradient_GOI * inside_GOI * (ZETA - GAMMA) * sigmoid_GOI * (1 - sigmoid_GOI)
        optimizer.step()
    up_GOI = _rectified_sigmoid(v_GOI.detach()) >= 0.5
    return (floor_GOI + up_GOI).clamp(*limits)


def _rectified_sigmoid(v: torch.Tensor) -> torch.Tensor:
    return (v.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def _inverse_sigmoid(share: torch.Tensor) -> torch.Tensor:
    return -torch.log((ZETA - GAMMA) / (share - GAMMA) - 1)


def _penalty_gradient(share: torch.Tensor, progress: float) -> torch.Tensor:
    """Return the gradient of the penalty ``1 - |2 share - 1| ** power``, annealed by progress."""
    if progress < WARM_UP:
        return torch.zeros_like(share)
    annealed = (progress - WARM_UP) / (1 - WARM_UP)
    power = LAST_POWER + (FIRST_POWER - LAST_POWER) * 0.5 * (1 + math.cos(annealed * math.pi))
    side = 2 * share - 1
    return -PENALTY * 2 * power * side.abs() ** (power - 1) * side.sign()


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
