"""Learned step size quantization (LSQ): the scale is trained like a weight.

After Esser et al., "Learned Step Size Quantization" (2020), equations 1 to 3 and section 2.2, with
a fixed zero point.
"""

from __future__ import annotations

import math
from typing import Any

import torch

LARGEST_LOG_GRADIENT = 1.0
"""Bound of the gradient of a scale's logarithm. An update is a share of the scale, so without a
bound it runs away where a loss is large."""


class LearnedStepSize(torch.autograd.Function):
    """Fake quantization with a gradient of the scale.

    What is trained is the scale's logarithm, which keeps the scale above 0. Its gradient is divided
    by the scale, so that an update changes the scale by the same share as in the paper.
    """

    @classmethod
    def quantize(
        cls,
        values: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor,
        axis: int | None,
        quant_min: int,
        quant_max: int,
    ) -> torch.Tensor:
        """Return the quantized and dequantized weight, or activations where `axis` is None.

        The scale, one or one for each channel on the axis, is the exponential of what is trained.
        """
        # Section 2.2: values of one sample, or weights of one channel, that share a scale.
        sharing = values.numel() / (len(values) if axis is None else scale.numel())
        factor = 1 / math.sqrt(max(1.0, sharing) * quant_max)
        qparams = (scale, zero_point, axis, quant_min, quant_max)
        result: torch.Tensor = cls.apply(factor, values, *qparams)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(context: Any, factor: float, *operands: Any) -> torch.Tensor:
        """Fake-quantize as with a scale that is not trained."""
        context.save_for_backward(*operands[:3])
        context.options = *operands[3:], factor
        return fake_quantize(*operands)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of values and scales."""
        (gradient,), (values, scale, zero_point) = gradients, context.saved_tensors
        axis, quant_min, quant_max, factor = context.options
        shape = [1] * values.dim()
        if axis is not None:
            shape[axis] = -1
        scaled = values / scale.view(shape)
        zero = zero_point.view(shape)
        clipped = scaled.clamp(quant_min - zero, quant_max - zero)
        within = clipped == scaled
        step = clipped.round() - torch.where(within, scaled, 0.0)
        per_scale = (gradient * step * factor).sum([a for a in range(values.dim()) if a != axis])
        bound = LARGEST_LOG_GRADIENT
        of_log = (per_scale.view_as(scale) / scale).clamp(-bound, bound)
        return None, gradient * within, of_log / scale, None, None, None, None


def fake_quantize(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    axis: int | None,
    quant_min: int,
    quant_max: int,
) -> torch.Tensor:
    """Quantize and dequantize; the gradient is 1 within the range and 0 beyond."""
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(
            values, scale, zero_point, quant_min, quant_max
        )
    return torch.fake_quantize_per_channel_affine(
        values, scale, zero_point, axis, quant_min, quant_max
    )
