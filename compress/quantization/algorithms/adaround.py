"""Each weight rounded up or down so that its layer's answers stay, not the weight itself.

After Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization" (2020), section
3.4: the choice is relaxed to a number between 0 and 1, which a growing penalty drives to either.
Letters: G groups, O outputs and I inputs of a group.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from compress.quantization.algorithms.matmul_view import Moments, matrix
from compress.quantization.pt2e.observed_layers import put_weight_, weight_observer_of, weight_of

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compress.quantization.algorithms.matmul_view import Pairs

ZETA, GAMMA = 1.1, -0.1
"""How far the sigmoid is stretched, so that 0 and 1 are reached."""
FIRST_POWER, LAST_POWER = 20.0, 2.0
"""Of the penalty: while high, numbers far from both ends are free to move."""
PENALTY = 5.0
"""Relative to an error that rounding to the nearest sets to 1 a weight."""
FREE_SHARE = 0.2
"""Share of the steps without penalty."""
RATE = 0.1


def round_adaptively_(prepared: GraphModule, layer: Node, pairs: Pairs, steps: int) -> float:
    """Replace a layer's weight by the floats of adaptively rounded integers, in place.

    To round these to the nearest gives the same integers again.

    Args:
        prepared: a graph whose observers know their ranges.
        layer: a layer of it.
        pairs: what the layer reads.
        steps: optimization steps.

    Returns:
        Share of the weights that are not rounded to the nearest.
    """
    weight, observer = weight_of(prepared, layer), weight_observer_of(prepared, layer)
    scale_O, _ = observer.calculate_qparams()
    weight_GOI = matrix(layer, weight)
    scale_GO1 = scale_O.view(*weight_GOI.shape[:2], 1)
    moments = Moments.of(pairs, layer, weight.shape[2:])
    limits = observer.quant_min, observer.quant_max
    integers_GOI = adaptive(weight_GOI, scale_GO1, limits, moments, steps)
    put_weight_(prepared, layer, (integers_GOI * scale_GO1).reshape(weight.shape))
    nearest_GOI = (weight_GOI / scale_GO1).round().clamp(*limits)
    return float((integers_GOI != nearest_GOI).float().mean())


def adaptive(
    weight_GOI: torch.Tensor,
    scale_GO1: torch.Tensor,
    limits: tuple[int, int],
    moments: Moments,
    steps: int,
) -> torch.Tensor:
    """Return the integers whose layer answers nearest to the float one.

    The squared error of the answers is a quadratic form in the weights, so the moments of the
    inputs stand for all samples.

    Args:
        weight_GOI: a layer's weight.
        scale_GO1: size of a step.
        limits: smallest and largest integer.
        moments: what the layer reads.
        steps: optimization steps.
    """
    exact_GOI = weight_GOI / scale_GO1
    below_GOI = exact_GOI.floor()
    curve_GII = moments.yy_GII.float()
    slope_GOI = exact_GOI @ (moments.yy_GII - moments.xy_GII).float()
    size_GO1 = _nearest_error(exact_GOI, curve_GII).clamp(min=1e-12)
    choice = _inverse_sigmoid(exact_GOI - below_GOI).requires_grad_()
    optimizer = torch.optim.Adam([choice], lr=RATE)
    for step in range(steps):
        share = _stretched(choice.detach())
        sigmoid = choice.detach().sigmoid()
        off_GOI = (below_GOI + share).clamp(*limits) - exact_GOI
        gradient = 2 * (off_GOI @ curve_GII + slope_GOI) / size_GO1 + _penalty(share, step / steps)
        inside = (share > 0) & (share < 1)
        choice.grad = gradient * inside * (ZETA - GAMMA) * sigmoid * (1 - sigmoid)
        optimizer.step()
    up_GOI = _stretched(choice.detach()) >= 0.5
    return (below_GOI + up_GOI).clamp(*limits)


def _nearest_error(exact_GOI: torch.Tensor, curve_GII: torch.Tensor) -> torch.Tensor:
    """Return for each output the squared error per weight that rounding to the nearest makes."""
    off_GOI = exact_GOI.round() - exact_GOI
    return ((off_GOI @ curve_GII) * off_GOI).mean(-1, keepdim=True)


def _stretched(choice: torch.Tensor) -> torch.Tensor:
    return (choice.sigmoid() * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def _inverse_sigmoid(share: torch.Tensor) -> torch.Tensor:
    return -torch.log((ZETA - GAMMA) / (share - GAMMA) - 1)


def _penalty(share: torch.Tensor, done: float) -> torch.Tensor:
    """Return the gradient of the penalty ``1 - |2 share - 1| ** power``."""
    if done < FREE_SHARE:
        return torch.zeros_like(share)
    annealed = (done - FREE_SHARE) / (1 - FREE_SHARE)
    power = LAST_POWER + (FIRST_POWER - LAST_POWER) * 0.5 * (1 + math.cos(annealed * math.pi))
    side = 2 * share - 1
    return -PENALTY * 2 * power * side.abs() ** (power - 1) * side.sign()
