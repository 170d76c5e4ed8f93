"""How far tensors are from others, summed up batch by batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LARGEST_DB = 150.0
"""What equal tensors are given, and with a minus those that are not finite: no float32 has more."""


@dataclass
class Deviation:
    """Sums over all tensors that were added; none of them is kept."""

    signal: float = 0.0
    noise: float = 0.0
    cosines: float = 0.0
    rows: int = 0

    def add(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Take in a batch of what is right, and of what is there.

        Where the expected tensor is itself infinite or NaN, such as in a mask, nothing is compared,
        but that a NaN is there only where one is expected.
        """
        right_NF, there_NF = _rows(expected), _rows(found)
        known = right_NF.isfinite()
        if not bool(known.all()):
            if bool((there_NF.isnan() & ~right_NF.isnan()).any()):
                self.noise = math.inf
            right_NF, there_NF = right_NF.where(known, 0), there_NF.where(known, 0)
        self.signal += float(right_NF.square().sum())
        noise = float((right_NF - there_NF).square().sum())
        self.noise += noise if math.isfinite(noise) else math.inf
        self.cosines += float(_cosines(right_NF, there_NF).sum())
        self.rows += len(right_NF)

    @property
    def is_finite(self) -> bool:
        """Whether every tensor was finite where the expected one was."""
        return math.isfinite(self.noise)

    @property
    def sqnr_db(self) -> float:
        """Signal to noise ratio, in decibels."""
        if self.noise == 0:
            return LARGEST_DB
        if self.signal == 0 or not self.is_finite:
            return -LARGEST_DB
        return max(-LARGEST_DB, min(LARGEST_DB, 10 * math.log10(self.signal / self.noise)))

    @property
    def cosine(self) -> float:
        """Mean of the rows' cosines."""
        return self.cosines / self.rows if self.rows and self.is_finite else 0.0


def _rows(values: torch.Tensor) -> torch.Tensor:
    return values.detach().double().reshape(len(values) if values.dim() > 1 else 1, -1)


def _cosines(a_NF: torch.Tensor, b_NF: torch.Tensor) -> torch.Tensor:
    """Return each row's cosine: 1 where both are zero, 0 where only one is."""
    lengths_N = a_NF.norm(dim=1) * b_NF.norm(dim=1)
    equal_N = (a_NF == b_NF).all(dim=1).double()
    cosines_N = (a_NF * b_NF).sum(1) / lengths_N.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(lengths_N > 0, cosines_N, equal_N)
