"""Fake-quantize modules: they round as integers will, and gradients pass through.

The names of parameters and buffers are keys of training checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.quantization.pt2e.quantizer import SMALLEST_SCALE
from compress.quantization.pt2e.torchao_api import ObserverBase
from compress.quantization.qat.learned_step_size import LearnedStepSize, fake_quantize

if TYPE_CHECKING:
    from compress.quantization.pt2e.torchao_api import DerivedObserverOrFakeQuantize, MinMaxObserver

AVERAGING = 0.01
"""Weight of a batch in the moving average of an activation's range, as in torch's observers."""


class FreezeFlag(nn.Module):
    """A flag that is turned on once, and saved in checkpoints."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros((), dtype=torch.uint8))
        self.on = False
        """`state` as a Python value: reading it does not wait for a CUDA device."""

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
        """Take the format of an observer to replace; scale and zero point are set later."""
        super().__init__(observer.dtype)
        self.qscheme, self.ch_axis = observer.qscheme, getattr(observer, "ch_axis", None)
        self.quant_min, self.quant_max = observer.quant_min, observer.quant_max
        self.learn_scale = learn_scale
        self.frozen = FreezeFlag()
        """Whether the range stays as it is."""
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
