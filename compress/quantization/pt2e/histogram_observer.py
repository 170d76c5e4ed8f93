"""A histogram of all values seen so far, in memory that does not grow."""

from __future__ import annotations

import torch

HALF = 8192
"""Bins on either side of zero. The largest value lies in the outer half of them, so that a step of
8 bits spans 16 bins or more."""
CHUNK = 2**20
"""Values that are counted at a time."""


class Histogram(torch.nn.Module):
    """Counts of values in equal bins on both sides of zero.

    A bin is a power of two wide, and zero is an edge. So where a value falls outside, bins are
    merged by twos, no count is split, and the histogram is the same in whatever order or batches
    the values came. Zeros, of which a relu gives many, are counted apart.
    """

    counts: torch.Tensor
    zeros: torch.Tensor
    exponent: torch.Tensor

    def __init__(self) -> None:
        """Make an empty one."""
        super().__init__()
        self.register_buffer("counts", torch.zeros(2 * HALF, dtype=torch.int64))
        self.register_buffer("zeros", torch.zeros((), dtype=torch.int64))
        self.register_buffer("exponent", torch.tensor(-1000))

    @property
    def width(self) -> float:
        """Width of a bin."""
        return float(2.0 ** int(self.exponent))

    @property
    def total(self) -> int:
        """Number of values seen, zeros among them."""
        return int(self.counts.sum() + self.zeros)

    def edges(self) -> torch.Tensor:
        """Return the bins' edges in float64, one more than bins."""
        places = torch.arange(-HALF, HALF + 1, dtype=torch.float64, device=self.counts.device)
        return places * self.width

    def add_(self, values: torch.Tensor) -> None:
        """Count finite values, in place."""
        largest = max(map(abs, values.aminmax())) if values.numel() else torch.zeros(())
        if largest > 0:
            # A number is below 2 to the exponent that frexp gives.
            fits = int(torch.frexp(largest.double()).exponent) - HALF.bit_length() + 1
            if fits > int(self.exponent):
                self._widen_(fits)
        for part in torch.split(values.flatten(), CHUNK):
            nonzero = part[part != 0]
            self.zeros += part.numel() - nonzero.numel()
            bins = (nonzero.double() / self.width).floor_().long() + HALF
            self.counts += torch.bincount(bins, minlength=2 * HALF)

    def below(self, values: torch.Tensor) -> torch.Tensor:
        """Return how many values lie below each given one; those within a bin lie evenly spread."""
        counts = self.counts.double()
        upto = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        place = (values.double() / self.width + HALF).clamp(0, 2 * HALF)
        first = place.floor().clamp(max=2 * HALF - 1).long()
        return upto[first] + (place - first) * counts[first] + self.zeros * (values > 0)

    def quantiles(self, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values that these shares of all lie below, as far inside as they may be.

        Args:
            low: a share from 0, and less than 1.
            high: a share above 0, and up to 1.
        """
        counts = self.counts.double()
        counts[HALF] += self.zeros
        upto = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        wanted = torch.tensor([low, high], dtype=torch.float64, device=upto.device) * upto[-1]
        # Neither bin is empty: the one ends above its share, the other begins below.
        left = torch.searchsorted(upto, wanted[0], right=True) - 1
        right = torch.searchsorted(upto, wanted[1]) - 1
        bins = torch.stack([left, right])
        part = (wanted - upto[bins]) / counts[bins]
        found = (bins - HALF + part) * self.width
        return found[0], found[1]

    def _widen_(self, exponent: int) -> None:
        """Merge bins until one is two to a power wide, in place."""
        doublings = min(exponent - int(self.exponent), HALF.bit_length() - 1)
        merged = self.counts.view(-1, 2**doublings).sum(1)
        self.counts.zero_()
        start = HALF - len(merged) // 2
        self.counts[start : start + len(merged)] = merged
        self.exponent.fill_(exponent)
