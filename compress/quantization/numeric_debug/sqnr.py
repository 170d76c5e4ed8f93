"""Accumulate signal to quantization noise ratio and cosine similarity, batch by batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

LARGEST_DB = 150.0
"""SQNR of equal tensors, and negated of tensors that are not finite: no float32 has more."""


@dataclass
class Deviation:
    """Sums over all pairs of tensors that were added."""

    signal: float = 0.0
    noise: float = 0.0
    cosines: float = 0.0
    rows: int = 0

    def add(self, expected: torch.Tensor, actual: torch.Tensor) -> None:
        """Add a batch.

        Where the expected tensor is infinite or NaN, as in an attention mask, values are not
        compared; but a NaN where none is expected counts as infinite noise.
        """
        expected_NF, actual_NF = _rows(expected), _rows(actual)
        finite = expected_NF.isfinite()
        if not bool(finite.all()):
            if bool((actual_NF.isnan() & ~expected_NF.isnan()).any()):
                self.noise = math.inf
            expected_NF, actual_NF = expected_NF.where(finite, 0), actual_NF.where(finite, 0)
        self.signal += float(expected_NF.square().sum())
        noise = float((expected_NF - actual_NF).square().sum())
        self.noise += noise if math.isfinite(noise) else math.inf
        lengths_N = expected_NF.norm(dim=1) * actual_NF.norm(dim=1)
        dots_N = (expected_NF * actual_NF).sum(1)
        cosines_N = dots_N / lengths_N.clamp(min=torch.finfo(torch.float64).tiny)
        # Where a row is zero there is no cosine: 1 where both are, 0 where only one is.
        equal_N = (expected_NF == actual_NF).all(dim=1).double()
        self.cosines += float(torch.where(lengths_N > 0, cosines_N, equal_N).sum())
        self.rows += len(expected_NF)

    @property
    def is_finite(self) -> bool:
        """Whether every tensor was finite where the expected one was."""
        return math.isfinite(self.noise)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio, in decibels."""
        if self.noise == 0:
            return LARGEST_DB
        if self.signal == 0 or not self.is_finite:
            return -LARGEST_DB
        return max(-LARGEST_DB, min(LARGEST_DB, 10 * math.log10(self.signal / self.noise)))

    @property
    def cosine(self) -> float:
        """Mean of the rows' cosine similarities."""
        return self.cosines / self.rows if self.rows and self.is_finite else 0.0


def _rows(values: torch.Tensor) -> torch.Tensor:
    return values.detach().double().reshape(len(values) if values.dim() > 1 else 1, -1)
