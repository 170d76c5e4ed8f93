"""A histogram of all observed values, in constant memory."""

from __future__ import annotations

import torch

HALF = 8192
"""Bins on either side of zero. The largest value lies in the outer half of them, so a step of 8
bits spans at least 16 bins."""
CHUNK = 2**20
"""Values counted at once, which bounds the float64 copies."""


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
        for part in torch.split(values.flatten(), CHUNK):
            nonzero = part[part != 0]
            # Apart: a relu gives many zeros, and they are exact in every range.
            self.zeros += part.numel() - nonzero.numel()
            bins = (nonzero.double() / self.width).floor_().long() + HALF
            self.counts += torch.bincount(bins, minlength=2 * HALF)

    def count_below(self, values: torch.Tensor) -> torch.Tensor:
        """Return how many values lie below each given one, taken as uniform within a bin."""
        counts = self.counts.double()
        cumulative = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        position = (values.double() / self.width + HALF).clamp(0, 2 * HALF)
        bins = position.floor().clamp(max=2 * HALF - 1).long()
        return cumulative[bins] + (position - bins) * counts[bins] + self.zeros * (values > 0)

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
