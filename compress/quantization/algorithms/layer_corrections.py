"""Corrections of layers in a prepared graph: cross-layer equalization, rounding, bias correction.

Equalization gives neighbouring layers' channels equal ranges (section 4.1 of "Data-Free
Quantization", below; BatchNorm must have been folded), before calibration; the others follow it.
GPTQ (see `weight_rounding`) lets the weights of later inputs make up for those rounded before:
neighbouring pixels are so alike that most of the error can be taken back, in closed form.
AdaRound rounds each weight up or down so that its layer's output stays, not the weight itself:
Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization" (2020), section 3.4.
The choice is relaxed to a number between 0 and 1, which a growing penalty drives to either. Biases
undo the shift of a layer's mean output: Nagel et al., "Data-Free Quantization Through Weight
Equalization and Bias Correction" (2019), section 4.2, with the means measured on samples.
Letters: G groups, O outputs and I inputs of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from compress.graph.layer_gram import add_products_, compensate, hessian_factor, mirror_
from compress.graph.positive_definite import solve_positive_definite
from compress.quantization.pt2e.graph_capture import (
    fake_quantize,
    module_of,
    replace_value_,
    sample_rows,
)
from compress.quantization.pt2e.observer_ranges import (
    bias_of,
    layers_of,
    observer_of,
    set_weight_,
    skip_observers,
    weight_of,
)
from compress.quantization.pt2e.quantizer import CONVOLUTIONS, LINEAR, SMALLEST_SCALE

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    InputPairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
    """A layer's input for each batch: the float model's, and the quantized one's."""

SWEEPS = 20  # a layer between two others is changed by both; ranges converge after a few sweeps
RELU = torch.ops.aten.relu.default


def equalize_(prepared: GraphModule) -> list[str]:
    """Scale channels between neighbouring convolutions; return modules whose outputs it scales."""
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
                replace_value_(prepared, skip_observers(before.args[2]), bias_O / scale_O)
            scaled = by_input * scale_O.view(groups, 1, inputs, 1)
            set_weight_(prepared, after, scaled.reshape(next_weight.shape))
    return [module_of(before) or before.name for before, _ in pairs]


ROWS_PER_BATCH = 2048  # rows that are used of a batch: memory stays flat however large images are
ROWS_PER_SAMPLE = 128  # that are used on average: neighbouring positions are much alike


@dataclass
class LayerMoments:
    """Second moments of a layer's input y in the quantized model, and of the noise that it has.

    The noise is of the layer's outputs, W(x - y), with its float weight W and x in the float model.
    """

    yy_GII: torch.Tensor  # noqa: N815 - the letters name the axes
    noise_GOI: torch.Tensor  # noqa: N815
    """Mean of the noise times y."""

    @classmethod
    def from_pairs(
        cls, layer: Node, weight: torch.Tensor, pairs: InputPairs, *, centred: bool = False
    ) -> LayerMoments:
        """Compute means, in float64, over a sample of the rows that a layer's weight multiplies.

        With `centred` they are moments about the mean.
        """
        weight_GOI = weight_matrix(layer, weight)
        groups, _, inputs = weight_GOI.shape
        yy_GII = weight.new_zeros(groups, inputs, inputs, dtype=torch.float64)
        sums, rows = [torch.zeros(()).double()] * 3, 0
        for both in pairs:
            x_GNI, y_GNI = (input_rows(layer, values, weight.shape[2:]) for values in both)
            noise_GNO = (x_GNI - y_GNI) @ weight_GOI.mT
            if centred:
                # Products of values far from 0 would lose the digits of a small variance.
                if rows == 0:
                    origin_G1I = y_GNI[:, :1]
                y_GNI = y_GNI - origin_G1I
            add_products_(yy_GII, y_GNI)
            parts = (noise_GNO.mT @ y_GNI, y_GNI.sum(1), noise_GNO.sum(1))
            sums = [total + part.double() for total, part in zip(sums, parts, strict=True)]
            rows += x_GNI.shape[1]
        mirror_(yy_GII).div_(rows)
        noise_GOI, y_GI, noise_GO = (total / rows for total in sums)
        if centred:
            yy_GII.baddbmm_(y_GI[:, :, None], y_GI[:, None], alpha=-1)
            noise_GOI.baddbmm_(noise_GO[:, :, None], y_GI[:, None], alpha=-1)
        return cls(yy_GII, noise_GOI)


def weight_matrix(layer: Node, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as G by O by I."""
    groups = groups_of(layer)
    return weight.reshape(groups, len(weight) // groups, -1)


def weight_and_scale(prepared: GraphModule, layer: Node) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's weight as G by O by I, and the scale of each output, G by O by 1."""
    weight_GOI = weight_matrix(layer, weight_of(prepared, layer))
    scale_O, _ = observer_of(prepared, layer.args[1]).calculate_qparams()
    return weight_GOI, scale_O.view(*weight_GOI.shape[:2], 1)


def groups_of(layer: Node) -> int:
    """Return the number of groups of a layer's channels."""
    return 1 if layer.target is LINEAR else int(_argument(layer, 6, 1))


def input_rows(layer: Node, values: torch.Tensor, kernel: Sequence[int]) -> torch.Tensor:
    """Return a sample of the rows that a layer multiplies its weight with, G by N by I.

    For a convolution these are the patches of its input under the kernel, of the given sizes.
    """
    if math.prod(kernel) > 1:  # channels last, as all those of a pixel are chosen together
        values = values.movedim(1, -1).contiguous().movedim(-1, 1)
    patches = input_patches(layer, values, kernel).movedim(1, -1)
    places = patches.shape[: 1 + len(kernel)]
    # Chosen before they are gathered: of 3x3 kernels all of them take nine times the input.
    count = min(ROWS_PER_BATCH, ROWS_PER_SAMPLE * len(values))
    chosen_N = sample_rows(torch.arange(math.prod(places)), count)
    # Contiguous, as products for each of many groups take 17 times as long otherwise.
    rows = patches[torch.unravel_index(chosen_N, places)].movedim(-1, 1).contiguous()
    return rows.reshape(len(rows), groups_of(layer), -1).transpose(0, 1)


def sum_rows(layer: Node, values: torch.Tensor, kernel: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Return the sum of all rows that a layer multiplies its weight with, G by I, and their number.

    As float64: those of several batches would lose digits in float32.
    """
    # Over samples first: patches of a 5x5 kernel hold each value 25 times. Channels are last, as
    # convolutions leave them; in the order of the axes torch takes 15 times as long for the sum.
    total = values.movedim(1, -1).sum(0).movedim(-1, 0)[None]
    patches = input_patches(layer, total.double(), kernel)
    summed = (0, *range(2, 2 + len(kernel)))
    sums_GI = patches.sum(summed).view(groups_of(layer), -1)
    return sums_GI, len(values) * math.prod(patches.shape[axis] for axis in summed)


def input_patches(layer: Node, values: torch.Tensor, kernel: Sequence[int]) -> torch.Tensor:
    """Return a view of a layer's padded input: samples, channels, positions, kernel positions.

    A linear layer's input is N by I.
    """
    if layer.target is LINEAR:
        return values.flatten(0, -2)
    axes = len(kernel)
    stride, dilation = (_sizes(_argument(layer, index, 1), axes) for index in (3, 5))
    padding = _argument(layer, 4, 0)
    if isinstance(padding, str):
        total = [d * (k - 1) * (padding == "same") for k, d in zip(kernel, dilation, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in _sizes(padding, axes)]
    # F.pad takes the last axis first.
    patches = F.pad(values, [size for side in reversed(sides) for size in side])
    for axis, reach in enumerate(kernel):
        extent = dilation[axis] * (reach - 1) + 1
        patches = patches.unfold(2 + axis, extent, stride[axis])[..., :: dilation[axis]]
    return patches


def _sizes(value: Any, axes: int) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, list | tuple) else (value,)
    return sizes * axes if len(sizes) == 1 else sizes


def _argument(layer: Node, index: int, default: Any) -> Any:
    """Return an argument of a convolution: 3 stride, 4 padding, 5 dilation, 6 groups."""
    return layer.args[index] if len(layer.args) > index else default


ZETA, GAMMA = 1.1, -0.1  # stretch of the sigmoid, so that it reaches 0 and 1 (equation 23)
FIRST_POWER, LAST_POWER = 20.0, 2.0
"""Annealed exponent of the penalty: while it is high, values far from 0 and 1 move freely."""
PENALTY = 5.0
"""Weight of the penalty, where rounding to nearest has the mean squared error 1 per weight."""
WARM_UP = 0.2  # share of the steps without penalty
LEARNING_RATE = 0.1


def adaround_(prepared: GraphModule, layer: Node, pairs: InputPairs, steps: int) -> float:
    """Round a layer's weight adaptively in a calibrated graph; return the share not to nearest."""
    weight, observer = weight_of(prepared, layer), observer_of(prepared, layer.args[1])
    weight_GOI, scale_GO1 = weight_and_scale(prepared, layer)
    moments = LayerMoments.from_pairs(layer, weight, pairs)
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
    moments: LayerMoments,
    steps: int,
) -> torch.Tensor:
    """Return the integers, within limits, with which a layer's output is nearest to the float one.

    The squared error of the output is a quadratic form of the weights, so the second moments of the
    inputs replace the samples.
    """
    exact_GOI = weight_GOI / scale_GO1
    floor_GOI = exact_GOI.floor()
    hessian_GII = moments.yy_GII.float()
    slope_GOI = -moments.noise_GOI.float() / scale_GO1
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


RIDGE = 10.0
"""Of the mean variance of a layer's inputs, added to each: only directions of far more variance are
fitted, as others look different on other data (MTCNN's RNet: cosine .9982 with 0.1, .9986 with
10)."""

MOST_INPUTS = 4608
"""Of a layer that `gptq_` rounds, those of a 3x3 convolution of 512 channels: moments of the 25,088
of a VGG's first linear layer would take 5 GB each."""


def gptq_(prepared: GraphModule, layer: Node, pairs: InputPairs, *, bias_correction: bool) -> float:
    """Round a layer's weight by GPTQ in a calibrated graph; return the share not to nearest.

    Before it is rounded, a weight makes up for a part of the noise of the layer's input, by ridge
    regression of the float model's outputs. With bias correction the moments are those about the
    mean: shifts of the mean output the layer's bias takes back, if it has one.
    """
    weight, observer = weight_of(prepared, layer), observer_of(prepared, layer.args[1])
    if weight[0].numel() > MOST_INPUTS:
        return 0.0
    weight_GOI, scale_GO1 = weight_and_scale(prepared, layer)
    centred = bias_correction and bias_of(prepared, layer) is not None
    moments = LayerMoments.from_pairs(layer, weight, pairs, centred=centred)
    # What is added to their diagonals below leaves float32 digits enough, as in the papers' code.
    moment_GII, noise_GOI = moments.yy_GII.float(), moments.noise_GOI.float()
    del moments
    # Differences of large sums: of an input that never changes they may leave less than nothing.
    variance_GI = moment_GII.diagonal(dim1=1, dim2=2).clamp_(min=0)
    order_GI = variance_GI.argsort(descending=True, stable=True)
    # Not by `take_along_dim`, which takes three times as long.
    ordered = [
        moment_II[order_I][:, order_I]
        for moment_II, order_I in zip(moment_GII, order_GI, strict=True)
    ]
    factor_GII = hessian_factor(torch.stack(ordered))
    del ordered
    ridge_G1 = (RIDGE * variance_GI.mean(1, keepdim=True)).clamp(min=SMALLEST_SCALE)
    variance_GI += ridge_G1
    change_GOI = solve_positive_definite(moment_GII, noise_GOI.mT).mT
    # By a step at most, as rounding itself may: more would fit the sample.
    target_GOI = weight_GOI + change_GOI.clamp(-scale_GO1, scale_GO1)
    limits = observer.quant_min, observer.quant_max
    rounded_GOI = torch.empty_like(weight_GOI)

    scale_GO = scale_GO1[:, :, 0]

    def round_input(step: int, rest_GOL: torch.Tensor) -> torch.Tensor:
        rounded_GO = (rest_GOL[:, :, 0] / scale_GO).round().clamp(*limits) * scale_GO
        rounded_GOI[:, :, step] = rounded_GO
        return rounded_GO

    compensate(target_GOI.take_along_dim(order_GI[:, None], 2), factor_GII, round_input)
    rounded_GOI = rounded_GOI.take_along_dim(order_GI.argsort(1)[:, None], 2)
    set_weight_(prepared, layer, rounded_GOI.reshape(weight.shape))
    # Conversion rounds these values to nearest, which gives the same integers.
    nearest_GOI = (weight_GOI / scale_GO1).round().clamp(*limits)
    return float(((rounded_GOI / scale_GO1).round() != nearest_GOI).double().mean())


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
    quantized = fake_quantize(observer_of(prepared, layer.args[1]), weight_of(prepared, layer))
    weight_GOI, quantized_GOI = (weight_matrix(layer, w).double() for w in (weight, quantized))
    # The mean output is that of the mean input.
    shift_O, count = torch.zeros_like(bias_O, dtype=torch.float64), 0
    for both in pairs:
        (x_GI, rows), (y_GI, _) = (sum_rows(layer, v, weight.shape[2:]) for v in both)
        shift_GO1 = weight_GOI @ x_GI[..., None] - quantized_GOI @ y_GI[..., None]
        shift_O += shift_GO1.flatten()
        count += rows
    replace_value_(
        prepared, skip_observers(layer.args[2]), bias_O + (shift_O / count).to(bias_O.dtype)
    )
