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

    def add(self, expected: torch.Tensor, actual: torch.Tensor) -> None:
        """Add a batch.

        Where the expected tensor is infinite or NaN, as in an attention mask, values are not
        compared; but a NaN where none is expected counts as infinite noise.
        """
        rows = len(expected) if expected.dim() > 1 else 1
        is_single = expected.dtype is actual.dtype is torch.float32
        dtype = torch.float32 if is_single else torch.float64
        both = (x.detach().to(dtype).reshape(rows, -1) for x in (expected, actual))
        expected_NF, actual_NF = both
        signal = _sum_of_squares(expected_NF)
        if not math.isfinite(signal):  # as a value is: only then are they looked at one by one
            expected_NF, actual_NF = _where_finite(expected_NF, actual_NF)
            signal = _sum_of_squares(expected_NF)
        self.signal += signal
        self._add_rows(expected_NF, actual_NF)

    def _add_rows(self, expected_NF: torch.Tensor, actual_NF: torch.Tensor) -> None:
        noise = _sum_of_squares(expected_NF - actual_NF)
        self.noise += noise if math.isfinite(noise) else math.inf

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


@dataclass
class OutputDeviation(Deviation):
    """The deviation of a model's output, with the cosines of its rows."""

    cosines: float = 0.0
    rows: int = 0

    def _add_rows(self, expected_NF: torch.Tensor, actual_NF: torch.Tensor) -> None:
        super()._add_rows(expected_NF, actual_NF)
        expected_NF, actual_NF = expected_NF.double(), actual_NF.double()
        lengths_N = expected_NF.norm(dim=1) * actual_NF.norm(dim=1)
        dots_N = (expected_NF * actual_NF).sum(1)
        cosines_N = dots_N / lengths_N.clamp(min=torch.finfo(torch.float64).tiny)
        # Where a row is zero there is no cosine: 1 where both are, 0 where only one is.
        equal_N = (expected_NF == actual_NF).all(dim=1).double()
        self.cosines += float(torch.where(lengths_N > 0, cosines_N, equal_N).sum())
        self.rows += len(expected_NF)

    @property
    def cosine(self) -> float:
        """Mean of the rows' cosine similarities."""
        return self.cosines / self.rows if self.rows and self.is_finite else 0.0


def _sum_of_squares(values: torch.Tensor) -> float:
    # Added up in float64, without a copy in it. No float32 is too large for that.
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _where_finite(
    expected_NF: torch.Tensor, actual_NF: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both with zeros where the expected is not finite, but for a NaN of the other alone."""
    finite = expected_NF.isfinite()
    stray = actual_NF.isnan() & ~expected_NF.isnan()
    # Even where nothing is compared: infinity minus a finite number, as noise.
    return expected_NF.where(finite, 0), actual_NF.where(finite, 0).where(~stray, math.inf)
