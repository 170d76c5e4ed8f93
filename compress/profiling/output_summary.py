"""A model's outputs on all of a split, summarized while its metric is measured.

The summaries of two models tell how far apart each output is, without another pass over the data
and without keeping outputs: also of the outputs that no metric reads.
"""

from __future__ import annotations

import base64
import math
from typing import TYPE_CHECKING

from compress.common.config import Settings
from compress.common.lazy_modules import np, torch

if TYPE_CHECKING:
    from compress.common.forward import Predictor

SKETCH = 64  # numbers of a sketch: the distance of two models is off by 1 / √(2 · 64), some 9 %
AT_ONCE = 2**20
"""Elements summed in float64 at a time, and the largest row whose mean is kept: 8 MiB."""
NO_SPREAD = 0.01
"""Spread, relative to the outputs' norm, below which the norm is the scale: a model that answers
nearly the same to every sample would have rounding errors as large as its spread."""


def error_scale(squared_spread: float, squared_norm: float) -> float:
    """Return what a squared error is divided by: the spread between samples, or else the norm."""
    return squared_spread if squared_spread > NO_SPREAD**2 * squared_norm else squared_norm


class OutputSummary(Settings):
    """One output over all rows of a split."""

    rows: int
    elements: int
    """Of all rows; the same for two models that were called with the same batches."""
    not_finite: int
    """Infinite or NaN elements; they count as 0 in what follows."""
    squared_norm: float
    squared_spread: float
    """Squared distance to the mean row; the squared norm where rows differ in shape."""
    sketch: str
    """The elements' random projection: 64 float64 numbers, in base64. Sketches are linear, so the
    distance of two of them estimates that of the outputs (count sketch: Charikar et al. 2002)."""

    def relative_distance(self, other: OutputSummary) -> float | None:
        """Return the distance of another model's output, relative to the spread of this one.

        Infinite where other elements are finite; None where the shapes differ.
        """
        if (self.rows, self.elements) != (other.rows, other.elements):
            return None
        if self.not_finite != other.not_finite:
            return math.inf
        own, others = (np.frombuffer(base64.b64decode(s.sketch)) for s in (self, other))
        squared = float(np.square(others - own).sum())
        scale = error_scale(self.squared_spread, self.squared_norm)
        return float((squared / max(scale, 1e-18)) ** 0.5)


class OutputSummarizer:
    """Summarizes every output of a predictor that is called with a split's batches in order."""

    def __init__(self) -> None:
        self._sums: list[_Sums] = []

    def watch(self, predict: Predictor) -> Predictor:
        """Return the predictor, of which each call is added."""

        def predict_and_add(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            outputs = predict(*inputs)
            self._sums = self._sums or [_Sums() for _ in outputs]
            for sums, output in zip(self._sums, outputs, strict=True):
                sums.add(output)
            return outputs

        return predict_and_add

    def summaries(self) -> tuple[OutputSummary, ...]:
        """Return a summary of each output."""
        return tuple(sums.summary() for sums in self._sums)


class _Sums:
    """The sums over the calls so far, of one output."""

    def __init__(self) -> None:
        self._rows = self._elements = self._not_finite = 0
        self._squared_norm = 0.0
        self._sum_E: torch.Tensor | None = None
        """Sum over the rows; None before the first one, and where they differ in shape."""
        self._sketch_S = torch.zeros(SKETCH, dtype=torch.float64)
        self._signs_E = torch.zeros(0)
        self._row_generator = torch.Generator().manual_seed(1)

    def add(self, output: torch.Tensor) -> None:
        output = torch.view_as_real(output) if output.is_complex() else output
        rows_BE = output.detach().reshape(len(output) if output.dim() else 1, -1)
        width = rows_BE.shape[1] if rows_BE.numel() else 0
        if not width:
            return
        if len(self._signs_E) != width:
            generator = torch.Generator().manual_seed(0)
            signs_E = torch.randint(0, 2, (width,), generator=generator) * 2 - 1
            self._signs_E = signs_E.to(output.device, torch.float64)
            self._sum_E = None if self._rows or width > AT_ONCE else torch.zeros_like(self._signs_E)
        for part_BE in torch.split(rows_BE, max(1, AT_ONCE // width)):
            values_BE = part_BE.double()
            finite_BE = values_BE.isfinite()
            values_BE = values_BE.where(finite_BE, 0)
            self._rows += len(part_BE)
            self._elements += part_BE.numel()
            self._not_finite += int((~finite_BE).sum())
            self._squared_norm += float(values_BE.square().sum())
            if self._sum_E is not None:
                self._sum_E += values_BE.sum(0)
            signed_BE = torch.nn.functional.pad(values_BE * self._signs_E, (0, -width % SKETCH))
            folded_BS = signed_BE.view(len(part_BE), -1, SKETCH).sum(1).cpu()
            # Each row is rotated and has a sign of its own: a change that all rows share would
            # otherwise meet in the same places, where it may cancel.
            drawn_B = torch.randint(0, 2 * SKETCH, (len(part_BE),), generator=self._row_generator)
            places_BS = (drawn_B[:, None] + torch.arange(SKETCH)) % SKETCH
            signed_BS = folded_BS * (drawn_B[:, None] // SKETCH * 2 - 1)
            self._sketch_S.index_add_(0, places_BS.flatten(), signed_BS.flatten())

    def summary(self) -> OutputSummary:
        squared_spread = self._squared_norm
        if self._sum_E is not None:
            squared_spread -= float(self._sum_E.square().sum()) / self._rows
        return OutputSummary(
            rows=self._rows,
            elements=self._elements,
            not_finite=self._not_finite,
            squared_norm=self._squared_norm,
            squared_spread=max(squared_spread, 0.0),
            sketch=base64.b64encode(self._sketch_S.numpy().tobytes()).decode(),
        )
