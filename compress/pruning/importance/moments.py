"""Second moments of a layer's inputs and outputs: what least squares needs of activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_COLUMNS = 12288
"""Columns of the widest layer whose Gram matrix is computed: it takes 1.2 GB in float64."""


@dataclass
class Moments:
    """Sums over positions, for each group: of columns, answers, and their products.

    g: groups, i: columns (a weight's entries for one output), o: answers (output channels).
    """

    # Any: numbers until the first matrices are added, then tensors.
    positions: int = 0
    columns_gi: Any = 0.0
    answers_go: Any = 0.0
    gram_gii: Any = 0.0
    cross_gio: Any = 0.0
    energy: float = 0.0
    """Sum of squared answers."""

    def add_(self, columns_gpi: torch.Tensor, answers_gpo: torch.Tensor | None = None) -> None:
        """Add matrices of positions by columns and of positions by answers, in place."""
        self.positions += columns_gpi.shape[1]
        self.columns_gi = self.columns_gi + columns_gpi.sum(1)
        self.gram_gii = self.gram_gii + columns_gpi.mT @ columns_gpi
        if answers_gpo is None:
            return
        self.answers_go = self.answers_go + answers_gpo.sum(1)
        self.cross_gio = self.cross_gio + columns_gpi.mT @ answers_gpo
        self.energy += float(answers_gpo.square().sum())
