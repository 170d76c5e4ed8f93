"""A weight as integers of a few bits, and the rounding of what it is multiplied with."""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST = 127
"""Largest integer of an activation; the range of each group is symmetric."""
SMALLEST_RANGE = 2.0**-100
"""Groups of smaller activations become zeros; the reciprocal of a still smaller range overflows."""


class PackedWeight(NamedTuple):
    """Integers of a weight, two in a byte where they have 4 bits, the earlier one lower."""

    packed: torch.Tensor
    """Bytes, `(outputs, inputs · bits / 8)`."""
    scale: torch.Tensor
    """Scale of each group of inputs, `(outputs, groups)`."""
    zero_point: torch.Tensor
    """Zero point of each group, `(outputs, groups)`: an integer, or a float between two."""
    bits: int
    is_table: bool
    """Whether rows are looked up, as an embedding's, and not multiplied."""

    @property
    def group_size(self) -> int:
        """Numbers of a row that share a scale."""
        return self.packed.shape[1] * 8 // self.bits // self.scale.shape[1]

    def integers(self) -> torch.Tensor:
        """Return the integers, one in a byte."""
        if self.bits == 8:
            return self.packed
        return torch.stack((self.packed & 15, self.packed >> 4), -1).flatten(1)

    def dequantized(self) -> torch.Tensor:
        """Return the floats that the integers stand for."""
        grouped = self.integers().view(*self.scale.shape, -1).float()
        centred = grouped.sub_(self.zero_point.float()[..., None])
        return centred.mul_(self.scale[..., None]).flatten(1)


def round_activations(features: torch.Tensor, group_size: int) -> torch.Tensor:
    """Round activations to 8 bits, each `group_size` numbers of a row with a scale of their own."""
    groups = torch.unflatten(features, -1, (-1, group_size))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_RANGE)
    integers = (groups * (largest.reciprocal() * LARGEST)).round()
    floats: torch.Tensor = integers * (largest * (1 / LARGEST))
    return floats.flatten(-2)
