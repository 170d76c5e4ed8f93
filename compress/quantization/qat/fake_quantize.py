"""Fake quantization: numbers rounded as integers will round them, and trained through."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compress.quantization.pt2e.qspec import SMALLEST_SCALE
from compress.quantization.pt2e.torchao_api import ObserverBase
from compress.quantization.qat.learned_step_size import LearnedStep

if TYPE_CHECKING:
    from compress.quantization.pt2e.torchao_api import DerivedObserverOrFakeQuantize, MinMaxObserver

EACH_BATCH = 0.01
"""How far a batch moves the range of an activation."""


class Switch(nn.Module):
    """Something that is turned on once; a checkpoint knows whether it is."""

    state: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros((), dtype=torch.uint8))
        self.on = False
        """The same as a Python value, for which a CUDA device need not be waited for."""

    def turn_on_(self) -> None:
        """Turn on, in place."""
        if not self.on:
            self.on = True
            self.state.fill_(1)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.on = bool(self.state)


class FakeQuantize(ObserverBase):  # type: ignore[misc]  # torchao has no type information
    """Rounds to a grid of integers; gradients pass as if it did not (Bengio et al., 2013).

    It stands where an observer stood, and tells `convert_pt2e` the grid that it trained with.
    """

    def __init__(self, observer: MinMaxObserver, channels: int, learns: bool) -> None:
        """Take the format of an observer; the grid is still to come.

        Args:
            observer: whose place is taken.
            channels: number of scales.
            learns: whether the scales are trained.
        """
        super().__init__(observer.dtype)
        self.qscheme, self.ch_axis = observer.qscheme, getattr(observer, "ch_axis", None)
        self.quant_min, self.quant_max = observer.quant_min, observer.quant_max
        self.learns = learns
        self.frozen = Switch()
        """Whether the grid stays as it is."""
        if learns:
            self.log_scale = nn.Parameter(torch.zeros(channels))
        else:
            self.register_buffer("fixed_scale", torch.ones(channels))
        self.register_buffer("zero_point", torch.zeros(channels, dtype=torch.int32))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values on the grid."""
        values = values.float()
        if not (self.learns or self.frozen.on):
            with torch.no_grad():
                self.follow_(values)
        return self.rounded(values)

    @property
    def scale(self) -> torch.Tensor:
        """The steps between the numbers of the grid."""
        scale: torch.Tensor = self.log_scale.exp() if self.learns else self.fixed_scale
        return scale

    @torch.no_grad()
    def set_scale_(self, scale: torch.Tensor) -> None:
        """Change the steps, in place."""
        if self.learns:
            self.log_scale.copy_(scale.log())
        else:
            self.fixed_scale.copy_(scale)

    def follow_(self, values: torch.Tensor) -> None:
        """Let the grid follow the values, in place."""
        raise NotImplementedError

    def rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values on the grid as it is."""
        if self.learns:
            grid = self.zero_point, self.ch_axis, self.quant_min, self.quant_max
            return LearnedStep.rounded(values, self.scale, *grid)
        return on_grid(values, self.scale, self.zero_point, self)

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero point."""
        return self.scale.detach(), self.zero_point.to(torch.int64)


class ActivationFakeQuantize(FakeQuantize):
    """One grid for a tensor, which follows a moving average of its batches' extremes."""

    def __init__(self, observer: MinMaxObserver, learns: bool, follows: bool) -> None:
        """Take the format of an observer.

        Args:
            observer: whose place is taken.
            learns: whether the scale is trained.
            follows: whether batches move the range.
        """
        super().__init__(observer, 1, learns)
        self.follows = follows
        self.register_buffer("range", torch.zeros(2))

    @torch.no_grad()
    def begin_(self, observer: MinMaxObserver) -> None:
        """Begin with what an observer found, in place."""
        scale, zero_point = observer.calculate_qparams()
        self.set_scale_(scale.reshape(1))
        self.zero_point.copy_(zero_point.reshape(1))
        ends = torch.tensor([self.quant_min, self.quant_max]) - self.zero_point
        self.range.copy_(ends * self.scale)

    def follow_(self, values: torch.Tensor) -> None:
        """Move the range towards a batch's, in place; evaluation moves nothing."""
        if not (self.training and self.follows):
            return
        self.range.lerp_(torch.stack(torch.aminmax(values)), EACH_BATCH)
        low, high = self.range.clamp(max=0)[0], self.range.clamp(min=0)[1]
        symmetric = self.qscheme is torch.per_tensor_symmetric
        width = 2 * torch.maximum(-low, high) if symmetric else high - low
        steps = self.quant_max - self.quant_min
        self.set_scale_((width / steps).clamp(min=SMALLEST_SCALE))
        if not symmetric:
            zero_point = self.quant_min - torch.round(low / self.scale)
            self.zero_point.copy_(zero_point.clamp(self.quant_min, self.quant_max))


class WeightFakeQuantize(FakeQuantize):
    """One grid for each channel of a weight, around zero, which follows the largest number."""

    def __init__(self, observer: MinMaxObserver, channels: int, learns: bool) -> None:
        """Take the format of an observer.

        Args:
            observer: whose place is taken.
            channels: output channels of the weight.
            learns: whether the scales are trained.
        """
        super().__init__(observer, channels, learns)
        self.register_buffer("share", torch.ones(channels))
        self.register_buffer("floor", torch.full((channels,), SMALLEST_SCALE))

    @torch.no_grad()
    def begin_(self, observer: MinMaxObserver, weight: torch.Tensor) -> None:
        """Begin with what an observer found, in place.

        The share of the largest number that the grid spans stays what the observer made it. A
        channel of zeros has no such share; its grid may grow and not shrink.
        """
        scale_O = observer.calculate_qparams()[0]
        self.set_scale_(scale_O)
        largest_O = self._largest(weight)
        span_O = scale_O * self.quant_max
        self.share.copy_(torch.where(largest_O > 0, span_O / largest_O, 1.0))
        self.floor.copy_(torch.where(largest_O > 0, SMALLEST_SCALE, scale_O))

    def follow_(self, values: torch.Tensor) -> None:
        """Span the numbers of the weight as it is, in place."""
        span_O = self._largest(values) * self.share
        self.set_scale_(torch.maximum(span_O / self.quant_max, self.floor))

    def _largest(self, weight: torch.Tensor) -> torch.Tensor:
        sizes = weight.abs()
        return sizes.amax().reshape(1) if self.ch_axis is None else sizes.flatten(1).amax(1)


class BiasFakeQuantize(nn.Module):
    """Rounds a bias to 32 bits, in steps of its layer's input scale times weight scale."""

    def __init__(
        self, observer: DerivedObserverOrFakeQuantize, source: FakeQuantize, weight: FakeQuantize
    ) -> None:
        """Take the format of an observer.

        Args:
            observer: whose place is taken.
            source: the grid of the layer's input.
            weight: that of its weight.
        """
        super().__init__()
        self.quant_min, self.quant_max = observer.quant_min, observer.quant_max
        self.ch_axis = 0
        self.grids = (source, weight)  # in a tuple, so that they do not become submodules

    def forward(self, bias_O: torch.Tensor) -> torch.Tensor:
        """Return the bias on its grid."""
        (source, _), (weight_O, zero_point) = (grid.calculate_qparams() for grid in self.grids)
        return on_grid(bias_O, source * weight_O, torch.zeros_like(zero_point), self)


def on_grid(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    form: FakeQuantize | BiasFakeQuantize,
) -> torch.Tensor:
    """Return values on a grid; the gradient is 1 within its range and 0 beyond."""
    low, high = form.quant_min, form.quant_max
    zero_point = zero_point.to(torch.int32)
    if form.ch_axis is None:
        return torch.fake_quantize_per_tensor_affine(values, scale, zero_point, low, high)
    return torch.fake_quantize_per_channel_affine(
        values, scale, zero_point, form.ch_axis, low, high
    )
