"""Steps between rounded numbers that are trained like weights."""

from __future__ import annotations

import math
from typing import Any

import torch

LARGEST_SHARE = 1.0
"""Largest gradient of a step's logarithm."""


class LearnedStep(torch.autograd.Function):
    """Rounding whose step has a gradient.

    After Esser et al., "Learned Step Size Quantization" (2020), equations 1 to 3 and section 2.2,
    with a zero point that stays. What is trained is the logarithm of a step, which keeps it above
    0; its gradient is scaled so that a step moves by the share that it moves by in the paper, and
    limited: what grows by shares of itself runs away where a loss is large.
    """

    @classmethod
    def rounded(
        cls,
        values: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor,
        axis: int | None,
        low: int,
        high: int,
    ) -> torch.Tensor:
        """Return the values on a grid.

        Args:
            values: a weight, its channels on the axis, or a batch of activations.
            scale: the steps, computed as the exponential of what is trained.
            zero_point: the integer that 0 becomes.
            axis: of a weight's channels, or None.
            low: smallest integer.
            high: largest integer.
        """
        sharing = values.numel() / (len(values) if axis is None else scale.numel())
        factor = 1 / math.sqrt(max(1.0, sharing) * high)
        grid = (scale, zero_point, axis, low, high, factor)
        result: torch.Tensor = cls.apply(values, *grid)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(
        context: Any,
        values: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor,
        axis: int | None,
        low: int,
        high: int,
        factor: float,
    ) -> torch.Tensor:
        """Round as the grid that does not learn."""
        context.save_for_backward(values, scale, zero_point)
        context.grid = axis, low, high, factor
        if axis is None:
            return torch.fake_quantize_per_tensor_affine(values, scale, zero_point, low, high)
        return torch.fake_quantize_per_channel_affine(values, scale, zero_point, axis, low, high)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of values and steps."""
        (gradient,), (values, scale, zero_point) = gradients, context.saved_tensors
        axis, low, high, factor = context.grid
        shape = [1] * values.dim()
        if axis is not None:
            shape[axis] = -1
        scaled = values / scale.view(shape)
        middle = zero_point.view(shape)
        clipped = scaled.clamp(low - middle, high - middle)
        within = clipped == scaled
        step = clipped.round() - torch.where(within, scaled, 0.0)
        per_step = (gradient * step * factor).sum([a for a in range(values.dim()) if a != axis])
        share = (per_step.view_as(scale) / scale).clamp(-LARGEST_SHARE, LARGEST_SHARE)
        return gradient * within, share / scale, None, None, None, None, None, None
