"""Observers: how the range of an activation is estimated from calibration data.

All of them take constant memory, however many samples they see. torchao's own are the extremes
(`minmax`), their moving average, and `histogram`, which approximates the least squared error.
Those defined here share one exact histogram and differ in what they clip.
"""

from __future__ import annotations

from typing import Any

import torch

from compress.common.requirements import load_entry_point
from compress.quantization.config.dtype_scheme import added_observers
from compress.quantization.pt2e.torchao_api import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    UniformQuantizationObserverBase,
)

HALF = 8192
"""Bins on either side of zero. The largest value lies in the outer half of them, so a step of 8
bits spans at least 16 bins."""
CHUNK = 2**17  # values counted at once, whose copies fit a cache


class Histogram(torch.nn.Module):
    """Counts of values in equal bins, a power of two wide, on both sides of zero, which is an edge.

    Where a value falls outside, neighbouring bins are merged; no count is ever split, so the
    histogram does not depend on the order or the batches of the values.
    """

    counts: torch.Tensor
    zeros: torch.Tensor
    exponent: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counts", torch.zeros(2 * HALF, dtype=torch.int64))
        self.register_buffer("zeros", torch.zeros((), dtype=torch.int64))
        # Below that of any float32: the first value sets it.
        self.register_buffer("exponent", torch.tensor(-1000))

    @property
    def width(self) -> float:
        """Width of a bin."""
        return float(2.0 ** int(self.exponent))

    @property
    def total(self) -> int:
        """Number of values, zeros included."""
        return int(self.counts.sum() + self.zeros)

    def edges(self) -> torch.Tensor:
        """Return the bins' edges in float64, `(2 * HALF + 1,)`."""
        places = torch.arange(-HALF, HALF + 1, dtype=torch.float64, device=self.counts.device)
        return places * self.width

    def add_(self, values: torch.Tensor) -> None:
        """Count finite values, in place."""
        largest = max(map(abs, values.aminmax())) if values.numel() else torch.zeros(())
        if largest > 0:
            # A number is below 2 to the exponent that frexp gives.
            exponent = int(torch.frexp(largest.double()).exponent) - HALF.bit_length() + 1
            if exponent > int(self.exponent):  # merge bins until one is 2 ** exponent wide
                doublings = min(exponent - int(self.exponent), HALF.bit_length() - 1)
                merged = self.counts.view(-1, 2**doublings).sum(1)
                self.counts.zero_()
                start = HALF - len(merged) // 2
                self.counts[start : start + len(merged)] = merged
                self.exponent.fill_(exponent)
        # Dividing by a power of two is exact, in float32 unless it is a very large or small one.
        is_exact = values.dtype == torch.float32 and -126 < int(self.exponent) <= 0
        for part in torch.split(values.flatten(), CHUNK):
            scaled = part / self.width if is_exact else part.double() / self.width
            bins = scaled.floor_().add_(HALF).to(torch.int32)
            self.counts += torch.bincount(bins, minlength=2 * HALF)
            # Apart: a relu gives many zeros, and they are exact in every range. (`count_nonzero`
            # takes six times as long.)
            zeros = (part == 0).sum()
            self.zeros += zeros
            self.counts[HALF] -= zeros

    def count_below(self, values: torch.Tensor) -> torch.Tensor:
        """Return how many values lie below each given one, taken as uniform within a bin."""
        counts = self.counts.double()
        cumulative = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        position = (values.double() / self.width + HALF).clamp(0, 2 * HALF)
        bins = position.floor().clamp(max=2 * HALF - 1).long()
        return cumulative[bins] + (position - bins) * counts[bins] + self.zeros * (values > 0)

    def share_outside(
        self, ends: torch.Tensor, low: torch.Tensor | None, high: torch.Tensor | None
    ) -> float:
        """Return the share of the values beyond two ends, given the extremes of all of them.

        A bin may be wider than what matters; the exact extremes tell when none is beyond.
        """
        below, up_to = self.count_below(ends).tolist()
        if low is not None and ends[0] <= low:
            below = 0.0
        if high is not None and ends[1] >= high:
            up_to = self.total
        return float(1 - (up_to - below) / self.total) if self.total else 0.0

    def quantiles(self, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two quantiles, of shares low < 1 and high > 0.

        Where a range of values would do, the ones nearest to the middle.
        """
        counts = self.counts.double()
        counts[HALF] += self.zeros
        cumulative = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        wanted = cumulative.new_tensor([low, high]) * cumulative[-1]
        # Neither bin is empty: the left one ends above its share, the right one begins below.
        left = torch.searchsorted(cumulative, wanted[0], right=True) - 1
        right = torch.searchsorted(cumulative, wanted[1]) - 1
        bins = torch.stack([left, right])
        part = (wanted - cumulative[bins]) / counts[bins]
        quantiles = (bins - HALF + part) * self.width
        return quantiles[0], quantiles[1]


STRIDE = 32
"""Bins between two ranges that `entropy` compares: one or two steps of 8 bits; each costs a pass
over the histogram."""
CANDIDATES = 16
ZOOMS = 3  # `mse` and `l3` search grids of 16 ranges; each grid spans two steps of the previous one


class RangeObserver(UniformQuantizationObserverBase):  # type: ignore[misc]  # torchao is untyped
    """Base of observers that keep a histogram and choose the range when it is asked for."""

    min_val: torch.Tensor
    max_val: torch.Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("min_val", torch.tensor(float("inf")))
        self.register_buffer("max_val", torch.tensor(float("-inf")))
        self.histogram = Histogram()
        self._range: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count a tensor's values, and return it unchanged."""
        if x.numel() > 0:
            values = x.detach().to(self.min_val.dtype)
            low, high = values.aminmax()
            self.min_val.copy_(torch.minimum(self.min_val, low))
            self.max_val.copy_(torch.maximum(self.max_val, high))
            self.histogram.add_(values)
            self._range = None
        return x

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scale and zero point of the chosen range."""
        if self._range is None:
            only_zeros = not bool(self.histogram.counts.any())
            low, high = (self.min_val, self.max_val) if only_zeros else self.choose_range()
            low, high = low.to(self.min_val.dtype), high.to(self.min_val.dtype)
            self._range = low.clamp(min=self.min_val), high.clamp(max=self.max_val)
        scale, zero_point = self._calculate_qparams(*self._range)
        return scale, zero_point

    def choose_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range to quantize; the histogram has a value other than zero."""
        raise NotImplementedError

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._range = None


class PercentileObserver(RangeObserver):
    """Keeps the middle share of the values, as onnxruntime's percentile calibrator does."""

    def __init__(self, percentile: float = 99.99, **options: Any) -> None:
        """Set the share that is kept, in percent; half of the rest is clipped at either end."""
        super().__init__(**options)
        self.percentile = percentile

    def choose_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the two quantiles."""
        tail = (100 - self.percentile) / 200
        return self.histogram.quantiles(tail, 1 - tail)


class EntropyObserver(RangeObserver):
    """Keeps the range of least divergence: Migacz, "8-bit Inference with TensorRT" (GTC 2017)."""

    def choose_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range of least Kullback-Leibler divergence."""
        width = self.histogram.width
        lowest = int(torch.floor(self.min_val.double() / width).clamp(max=0))
        highest = int(torch.floor(self.max_val.double() / width)) + 1 if self.max_val > 0 else 0
        if "symmetric" in str(self.qscheme):
            highest = max(highest, -lowest)
            lowest = -highest
        # As in onnxruntime, ranges reach equally far to both sides of zero, but not beyond values.
        reach = max(highest, -lowest)
        levels = self.quant_max - self.quant_min + 1
        start = min(reach, levels if lowest == 0 or highest == 0 else levels // 2)
        ranges = [(max(lowest, -r), min(highest, r)) for r in (*range(start, reach, STRIDE), reach)]
        counts = self.histogram.counts.double()
        divergences = [_kl_divergence(counts, HALF + a, HALF + b, levels) for a, b in ranges]
        a, b = ranges[int(torch.stack(divergences).argmin())]
        ends = torch.tensor([a, b], dtype=torch.float64, device=counts.device) * width
        return ends[0], ends[1]


class SquaredErrorObserver(RangeObserver):
    """Keeps the range with the least squared error of rounding and clipping."""

    # torchao's `histogram`, which approximates the same, moves one end inwards while that helps and
    # so may stop early, models 2^bits steps between the ends instead of the zero point and steps
    # that are used, counts the many exact zeros of a relu as rounded numbers, counts in float32,
    # and moves counts between bins as its range grows.

    power = 2
    """What the errors are raised to."""

    def choose_range(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best ends, each searched in turn on finer and finer grids."""
        low, high = self.min_val.double().clamp(max=0), self.max_val.double().clamp(min=0)
        reach_low, reach_high = low, high
        for zoom in range(ZOOMS):
            window = (2 / CANDIDATES) ** zoom
            for _ in range(2):
                grid = _candidate_ends(high, reach_high, window)
                high = grid[self.error(low.expand_as(grid), grid).argmin()]
                grid = _candidate_ends(low, reach_low, window)
                low = grid[self.error(grid, high.expand_as(grid)).argmin()]
        return low, high

    def error(self, low_K: torch.Tensor, high_K: torch.Tensor) -> torch.Tensor:
        """Return the summed error of each of K ranges, to the power, values uniform in a bin."""
        scale_K, zero_K = self._calculate_qparams(low_K.float(), high_K.float())
        scale_K1 = scale_K.double().unsqueeze(1)
        lowest_K1, highest_K1 = (
            (end - zero_K).double().unsqueeze(1) for end in (self.quant_min, self.quant_max)
        )
        used = self.histogram.counts.nonzero()
        bins = slice(int(used[0]), int(used[-1]) + 1)
        edges_KE = self.histogram.edges()[bins.start : bins.stop + 1] / scale_K1
        nearest_KE = edges_KE.round().clamp(lowest_K1, highest_K1)
        # Antiderivative of |t - round(t)|^p: a constant for each whole step, and the part of one.
        off_KE, power = edges_KE - nearest_KE, self.power + 1
        part_KE = off_KE.sign() * off_KE.abs() ** power / power
        integral_KE = nearest_KE / (power * 2**self.power) + part_KE
        density_B = self.histogram.counts[bins].double() / self.histogram.width
        error_K: torch.Tensor = integral_KE.diff(dim=1) @ density_B * scale_K1.squeeze(1) ** power
        return error_K


class CubedErrorObserver(SquaredErrorObserver):
    """Keeps the range with the least sum of the cubes of the errors, which clips less."""

    power = 3


OBSERVERS = {
    "minmax": MinMaxObserver,
    "moving_average": MovingAverageMinMaxObserver,
    "histogram": HistogramObserver,
    "percentile": PercentileObserver,
    "entropy": EntropyObserver,
    "mse": SquaredErrorObserver,
    "l3": CubedErrorObserver,
}


def observer_class(name: str) -> Any:
    """Return the class of a built-in observer, or import one of a package (else Unavailable)."""
    if name in OBSERVERS:
        return OBSERVERS[name]
    return load_entry_point(added_observers()[name], "observer")


def _candidate_ends(best: torch.Tensor, reach: torch.Tensor, window: float) -> torch.Tensor:
    """Return ends around the best one so far, none beyond the extreme value or zero."""
    if window == 1:
        shares = torch.arange(1, CANDIDATES + 1, dtype=torch.float64, device=best.device)
        return reach * shares / CANDIDATES
    shares = torch.linspace(-0.5, 0.5, CANDIDATES + 1, dtype=torch.float64, device=best.device)
    ends = best + reach * shares * window
    return ends.clamp(torch.minimum(reach / HALF, reach), torch.maximum(reach / HALF, reach))


def _kl_divergence(counts: torch.Tensor, start: int, stop: int, levels: int) -> torch.Tensor:
    """Return the divergence of a clipped histogram, quantized to `levels`, from the clipped one."""
    part = counts[start:stop]
    level = torch.arange(len(part), device=part.device) * levels // len(part)
    used = part > 0
    mass_L = torch.bincount(level, part, minlength=levels)
    used_L = torch.bincount(level, used.double(), minlength=levels)
    quantized = torch.where(used, (mass_L / used_L.clamp(min=1))[level], 0)
    quantized /= quantized.sum().clamp(min=1)
    observed = part.clone()
    observed[0] += counts[:start].sum()
    observed[-1] += counts[stop:].sum()
    observed /= observed.sum()
    # Infinite where the clipped values alone fall into a bin that was empty.
    return (torch.xlogy(observed, observed) - torch.xlogy(observed, quantized)).sum()
