"""Fake-quantize modules: they round as integers will, and gradients pass through.

The names of parameters and buffers are keys of training checkpoints.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.quantization.pt2e.quantizer import SMALLEST_SCALE
from compress.quantization.pt2e.torchao_api import ObserverBase

if TYPE_CHECKING:
    from compress.quantization.pt2e.torchao_api import DerivedObserverOrFakeQuantize, MinMaxObserver

LARGEST_LOG_GRADIENT = 1.0
"""Bound of the gradient of a scale's logarithm. An update is a share of the scale, so without a
bound it runs away where a loss is large."""


class LearnedStepSize(torch.autograd.Function):
    """Fake quantization with a gradient of the scale (LSQ).

    Esser et al., "Learned Step Size Quantization" (2020), equations 1 to 3, fixed zero point.
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


AVERAGING = 0.01
"""Weight of a batch in the moving average of an activation's range, as in torch's observers."""


class FreezeFlag(nn.Module):
    """A flag that is turned on once, and saved in checkpoints."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros((), dtype=torch.uint8))
        self.on = False  # `state` as a Python value: reading it does not wait for a CUDA device

    def turn_on_(self) -> None:
        """Set the flag."""
        if not self.on:
            self.on = True
            self.state.fill_(1)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.on = bool(self.state)


class FakeQuantize(ObserverBase):  # type: ignore[misc]  # torchao has no type information
    """Quantizes and dequantizes with a straight-through gradient (Bengio et al., 2013).

    It takes the place of an observer, and gives `convert_pt2e` the scale that it trained with.
    """

    # torch's `FusedMovingAvgObsFakeQuantize` trains per-channel weights with another scale than
    # conversion uses, so that 4 % of the labels change.

    def __init__(self, observer: MinMaxObserver, channels: int, learn_scale: bool) -> None:
        super().__init__(observer.dtype)
        self.qscheme, self.ch_axis = observer.qscheme, getattr(observer, "ch_axis", None)
        self.quant_min, self.quant_max = observer.quant_min, observer.quant_max
        self.learn_scale = learn_scale
        self.frozen = FreezeFlag()
        if learn_scale:
            self.log_scale = nn.Parameter(torch.zeros(channels))
        else:
            self.register_buffer("fixed_scale", torch.ones(channels))
        self.register_buffer("zero_point", torch.zeros(channels, dtype=torch.int32))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Update the range where it follows the values, and fake-quantize them."""
        values = values.float()
        if not (self.learn_scale or self.frozen.on):
            with torch.no_grad():
                self.update_range_(values)
        return self.quantized(values)

    @property
    def scale(self) -> torch.Tensor:
        """The step between neighbouring integers, `(channels,)`."""
        scale: torch.Tensor = self.log_scale.exp() if self.learn_scale else self.fixed_scale
        return scale

    @torch.no_grad()
    def set_scale_(self, scale: torch.Tensor) -> None:
        """Set the scales."""
        if self.learn_scale:
            self.log_scale.copy_(scale.log())
        else:
            self.fixed_scale.copy_(scale)

    def update_range_(self, values: torch.Tensor) -> None:
        """Let the range follow the values."""
        raise NotImplementedError

    def quantized(self, values: torch.Tensor) -> torch.Tensor:
        """Fake-quantize values with the current scale."""
        apply = LearnedStepSize.quantize if self.learn_scale else fake_quantize
        return apply(
            values, self.scale, self.zero_point, self.ch_axis, self.quant_min, self.quant_max
        )

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero point."""
        return self.scale.detach(), self.zero_point.to(torch.int64)


class ActivationFakeQuantize(FakeQuantize):
    """Per-tensor fake quantization; the range is a moving average of the batches' extremes."""

    def __init__(self, observer: MinMaxObserver, learn_scale: bool, track_range: bool) -> None:
        """Take the format of an observer; with `track_range` batches move the range."""
        super().__init__(observer, 1, learn_scale)
        self.track_range = track_range
        self.register_buffer("range", torch.zeros(2))

    @torch.no_grad()
    def init_from_observer_(self, observer: MinMaxObserver) -> None:
        """Start with an observer's scale and zero point."""
        scale, zero_point = observer.calculate_qparams()
        self.set_scale_(scale.reshape(1))
        self.zero_point.copy_(zero_point.reshape(1))
        ends = torch.tensor([self.quant_min, self.quant_max]) - self.zero_point
        self.range.copy_(ends * self.scale)

    def update_range_(self, values: torch.Tensor) -> None:
        """Move the range towards a batch's extremes; evaluation moves nothing."""
        if not (self.training and self.track_range):
            return
        self.range.lerp_(torch.stack(torch.aminmax(values)), AVERAGING)
        low, high = self.range.clamp(max=0)[0], self.range.clamp(min=0)[1]
        symmetric = self.qscheme is torch.per_tensor_symmetric
        width = 2 * torch.maximum(-low, high) if symmetric else high - low
        steps = self.quant_max - self.quant_min
        self.set_scale_((width / steps).clamp(min=SMALLEST_SCALE))
        if not symmetric:
            zero_point = self.quant_min - torch.round(low / self.scale)
            self.zero_point.copy_(zero_point.clamp(self.quant_min, self.quant_max))


class WeightFakeQuantize(FakeQuantize):
    """Per-channel, symmetric fake quantization; the range follows each channel's largest weight."""

    def __init__(self, observer: MinMaxObserver, channels: int, learn_scale: bool) -> None:
        super().__init__(observer, channels, learn_scale)
        self.register_buffer("share", torch.ones(channels))
        self.register_buffer("floor", torch.full((channels,), SMALLEST_SCALE))

    @torch.no_grad()
    def init_from_observer_(self, observer: MinMaxObserver, weight: torch.Tensor) -> None:
        """Start with an observer's scale for a weight."""
        scale_O = observer.calculate_qparams()[0]
        self.set_scale_(scale_O)
        largest_O = self._largest(weight)
        range_O = scale_O * self.quant_max
        # The range stays the same multiple of the largest weight as the observer chose. A channel
        # of zeros has no such multiple; its scale may grow but not shrink.
        self.share.copy_(torch.where(largest_O > 0, range_O / largest_O, 1.0))
        self.floor.copy_(torch.where(largest_O > 0, SMALLEST_SCALE, scale_O))

    def update_range_(self, values: torch.Tensor) -> None:
        """Span the weights as they are now."""
        range_O = self._largest(values) * self.share
        self.set_scale_(torch.maximum(range_O / self.quant_max, self.floor))

    def _largest(self, weight: torch.Tensor) -> torch.Tensor:
        magnitudes = weight.abs()
        if self.ch_axis is None:
            return magnitudes.amax().reshape(1)
        return magnitudes.flatten(1).amax(1)


class BiasFakeQuantize(nn.Module):
    """Quantizes a bias to int32 with scale `input_scale * weight_scale`."""

    def __init__(
        self, observer: DerivedObserverOrFakeQuantize, source: FakeQuantize, weight: FakeQuantize
    ) -> None:
        super().__init__()
        self.quant_min, self.quant_max = observer.quant_min, observer.quant_max
        self.inputs = (source, weight)  # a tuple, so that they are not registered as submodules

    def forward(self, bias_O: torch.Tensor) -> torch.Tensor:
        """Return the fake-quantized bias."""
        (scale, _), (scale_O, zero_point) = (part.calculate_qparams() for part in self.inputs)
        zeros_O = torch.zeros_like(zero_point, dtype=torch.int32)
        return fake_quantize(bias_O, scale * scale_O, zeros_O, 0, self.quant_min, self.quant_max)
