"""How the range of an activation is estimated from what calibration saw of it.

All of them hold a fixed number of numbers, however many samples they see. torchao's own: extremes
(`minmax`), their moving average, and `histogram`, which searches for the least squared error too.
The three here share one exact histogram and choose differently what to cut off.
"""

from __future__ import annotations

from typing import Any

import torch

from compress.quantization.pt2e.histogram_observer import HALF, Histogram
from compress.quantization.pt2e.torchao_api import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    UniformQuantizationObserverBase,
)

STRIDE = 32
"""Bins between two ranges that entropy compares: a step of 8 bits, or two."""
CANDIDATES = 16
ZOOMS = 3
"""The error is searched on grids of 16 ranges, each grid two steps of the one before."""


class RangeObserver(UniformQuantizationObserverBase):  # type: ignore[misc]  # torchao is untyped
    """Counts the values it sees, and chooses a range when it is asked for scale and zero point."""

    min_val: torch.Tensor
    max_val: torch.Tensor

    def __init__(self, **options: Any) -> None:
        """Take what torchao gives every observer: dtype, qscheme, quant_min, quant_max, eps."""
        super().__init__(**options)
        self.register_buffer("min_val", torch.tensor(float("inf")))
        self.register_buffer("max_val", torch.tensor(float("-inf")))
        self.seen = Histogram()
        self._chosen: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count a tensor's values, and return it."""
        if x.numel() > 0:
            values = x.detach().to(self.min_val.dtype)
            low, high = values.aminmax()
            self.min_val.copy_(torch.minimum(self.min_val, low))
            self.max_val.copy_(torch.maximum(self.max_val, high))
            self.seen.add_(values)
            self._chosen = None
        return x

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero point of the chosen range."""
        if self._chosen is None:
            empty = not bool(self.seen.counts.any())
            low, high = (self.min_val, self.max_val) if empty else self.choose()
            low, high = low.to(self.min_val.dtype), high.to(self.min_val.dtype)
            self._chosen = low.clamp(min=self.min_val), high.clamp(max=self.max_val)
        scale, zero_point = self._calculate_qparams(*self._chosen)
        return scale, zero_point

    def choose(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range to be kept; not all values seen were zero."""
        raise NotImplementedError

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self._chosen = None


class PercentileObserver(RangeObserver):
    """Keeps the middle share of the values, as onnxruntime's percentile calibrator does."""

    def __init__(self, percentile: float = 99.99, **options: Any) -> None:
        """Set the share that is kept, in percent; half of the rest is cut off at either end."""
        super().__init__(**options)
        self.percentile = percentile

    def choose(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two quantiles."""
        cut = (100 - self.percentile) / 200
        return self.seen.quantiles(cut, 1 - cut)


class EntropyObserver(RangeObserver):
    """Keeps the range whose rounded distribution tells least apart from the one that was seen.

    Migacz, "8-bit Inference with TensorRT" (GTC 2017). As in onnxruntime, ranges reach equally far
    to both sides of zero, and no further than values do.
    """

    def choose(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range of least Kullback-Leibler divergence."""
        width = self.seen.width
        lowest = int(torch.floor(self.min_val.double() / width).clamp(max=0))
        highest = int(torch.floor(self.max_val.double() / width)) + 1 if self.max_val > 0 else 0
        if "symmetric" in str(self.qscheme):
            highest = max(highest, -lowest)
            lowest = -highest
        reach = max(highest, -lowest)
        levels = self.quant_max - self.quant_min + 1
        first = min(reach, levels if lowest == 0 or highest == 0 else levels // 2)
        ranges = [(max(lowest, -r), min(highest, r)) for r in (*range(first, reach, STRIDE), reach)]
        counts = self.seen.counts.double()
        divergences = [_divergence(counts, HALF + a, HALF + b, levels) for a, b in ranges]
        a, b = ranges[int(torch.stack(divergences).argmin())]
        ends = torch.tensor([a, b], dtype=torch.float64, device=counts.device) * width
        return ends[0], ends[1]


class SquaredErrorObserver(RangeObserver):
    """Keeps the range that rounding and cutting off lose the least square of.

    torchao's `histogram` seeks the same. It differs in that it moves one end in while that helps
    and so may stop early, models 2^bits steps between the ends instead of the zero point and the
    steps that will be used, takes the many exact zeros of a relu for rounded numbers, counts in
    float32, and shifts counts between bins as its range grows.
    """

    def choose(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best ends, searched in turn on finer and finer grids."""
        low, high = self.min_val.double().clamp(max=0), self.max_val.double().clamp(min=0)
        reach_low, reach_high = low, high
        for zoom in range(ZOOMS):
            window = (2 / CANDIDATES) ** zoom
            for _ in range(2):
                grid = _grid(high, reach_high, window)
                high = grid[self.error(low.expand_as(grid), grid).argmin()]
                grid = _grid(low, reach_low, window)
                low = grid[self.error(grid, high.expand_as(grid)).argmin()]
        return low, high

    def error(self, low_K: torch.Tensor, high_K: torch.Tensor) -> torch.Tensor:
        """Return the summed squared error of each of K ranges.

        Values lie evenly spread within their bins; over these, the error is integrated exactly.
        """
        scale_K, zero_K = self._calculate_qparams(low_K.float(), high_K.float())
        scale_K1 = scale_K.double().unsqueeze(1)
        first_K1, last_K1 = (
            (end - zero_K).double().unsqueeze(1) for end in (self.quant_min, self.quant_max)
        )
        used = self.seen.counts.nonzero()
        bins = slice(int(used[0]), int(used[-1]) + 1)
        steps_KE = self.seen.edges()[bins.start : bins.stop + 1] / scale_K1
        nearest_KE = steps_KE.round().clamp(first_K1, last_K1)
        # The integral of (t - nearest(t))^2: a twelfth for each step passed, and the part of one.
        integral_KE = nearest_KE / 12 + (steps_KE - nearest_KE) ** 3 / 3
        density_B = self.seen.counts[bins].double() / self.seen.width
        error_K: torch.Tensor = integral_KE.diff(dim=1) @ density_B * scale_K1.squeeze(1) ** 3
        return error_K


OBSERVERS = {
    "minmax": MinMaxObserver,
    "moving_average": MovingAverageMinMaxObserver,
    "histogram": HistogramObserver,
    "percentile": PercentileObserver,
    "entropy": EntropyObserver,
    "mse": SquaredErrorObserver,
}


def _grid(best: torch.Tensor, reach: torch.Tensor, window: float) -> torch.Tensor:
    """Return ends about the best one so far, none beyond the values or zero."""
    if window == 1:
        shares = torch.arange(1, CANDIDATES + 1, dtype=torch.float64, device=best.device)
        return reach * shares / CANDIDATES
    shares = torch.linspace(-0.5, 0.5, CANDIDATES + 1, dtype=torch.float64, device=best.device)
    moved = best + reach * shares * window
    return moved.clamp(torch.minimum(reach / HALF, reach), torch.maximum(reach / HALF, reach))


def _divergence(counts: torch.Tensor, start: int, stop: int, levels: int) -> torch.Tensor:
    """Return the divergence of a part of a histogram, rounded to levels, from the whole."""
    part = counts[start:stop]
    level = torch.arange(len(part), device=part.device) * levels // len(part)
    used = part > 0
    mass_L = torch.bincount(level, part, minlength=levels)
    used_L = torch.bincount(level, used.double(), minlength=levels)
    rounded = torch.where(used, (mass_L / used_L.clamp(min=1))[level], 0)
    rounded /= rounded.sum().clamp(min=1)
    whole = part.clone()
    whole[0] += counts[:start].sum()
    whole[-1] += counts[stop:].sum()
    whole /= whole.sum()
    # Where only what was cut off falls into an empty bin, the divergence is infinite.
    return (torch.xlogy(whole, whole) - torch.xlogy(whole, rounded)).sum()
