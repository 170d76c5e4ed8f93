"""Splits a pruned model's loss among causes, by taking them away one after the other.

Causes that overlap cannot be compared by what returns without each alone: a group at its own width
returns what a missing refit loses, too. So the model is mended in an order, first by what costs
nothing, and each cause gets what returns beyond those before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from compress.core.diagnosis.layer_diagnosis import LayerDiagnosis
from compress.pruning.recovery.recovery import batch_norms, reestimate_batch_norms_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from compress.data.batch import Batch

Variant = TypeVar("Variant")


@dataclass
class PruningDiagnosis(LayerDiagnosis, Generic[Variant]):
    """A pruned model and its variants: with parts put back, or pruned with better settings."""

    _attributed: dict[tuple[str, ...], dict[str, float]] = field(default_factory=dict, init=False)
    _points: dict[Variant, float] = field(default_factory=dict, init=False)

    @property
    def own(self) -> Variant:
        """The model as the stage has made it, without fine-tuning."""
        raise NotImplementedError

    def remedies(self, layers: Sequence[str]) -> Iterable[tuple[str, Callable[[Variant], Variant]]]:
        """Return each cause with the function that mends it in a variant, in the order to try them.

        Args:
            layers: the guilty parts; empty where the loss is spread over the model.
        """
        raise NotImplementedError

    def changed_module(self, variant: Variant) -> nn.Module:
        """Return the module of a variant."""
        raise NotImplementedError

    def shares(self, layers: Sequence[str]) -> dict[str, float]:
        """Return cause → share of the loss that returns without it, beyond those before it."""
        key = tuple(layers)
        if key not in self._attributed:
            found: dict[str, float] = {}
            best, returned = self.own, 0.0
            for cause, mend in self.remedies(layers):
                mended = mend(best)
                if mended not in self._points:
                    module = self.changed_module(mended)
                    self._points[mended] = self._judge_module(self.decided_on, module)
                share = self.returned(self._points[mended])
                found[cause] = share - returned
                if share > returned:
                    best, returned = mended, share
            self._attributed[key] = found
        return self._attributed[key]


@torch.no_grad()
def batch_norm_shift(module: nn.Module, batches: Sequence[Batch], device: str) -> float:
    """Return how far BatchNorm statistics are from those of some batches, in deviations.

    Of the layer with the largest shift: the root mean square over its channels. The module is
    changed.
    """
    before = [
        (norm.running_mean.clone(), norm.running_var.clone())
        for norm in batch_norms(module)
        if norm.running_mean is not None and norm.running_var is not None
    ]
    reestimate_batch_norms_(module, batches, device)
    shifts = [0.0]
    for norm, (mean, variance) in zip(batch_norms(module), before, strict=False):
        if norm.running_mean is not None:
            shift = norm.running_mean.cpu() - mean.cpu()
            shifts.append(float((shift.square() / (variance.cpu() + norm.eps)).mean().sqrt()))
    return max(shifts)
