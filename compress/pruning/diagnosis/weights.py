"""A model of `prune_weights` whose layers get their weights back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from compress.common.forward import copy_module
from compress.pruning.diagnosis.diagnosis import PruningDiagnosis, batch_norm_shift
from compress.pruning.recovery.recovery import (
    batch_norms,
    output_error,
    reestimate_batch_norms_,
    usual_calibration,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from torch import nn

    from compress.artifacts.artifact import Artifact
    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.core.val_halves import HalfOfVal
    from compress.data.batch import Batch
    from compress.pruning.prune_weights import PruneWeights

RANKED_ON = 128
"""Samples on which layers are pruned alone, to rank them by the error of the outputs."""
BEST_METHOD = "sparsegpt"


@dataclass(frozen=True)
class Zeros:
    """How weights are set to zero."""

    method: str
    halfway: bool = False
    """Whether the share of zeros is halved."""
    batch_norm: bool = False
    """Whether BatchNorm statistics are re-estimated."""
    back: frozenset[str] = frozenset()
    """Tensors that keep their own weights."""


@dataclass
class ZeroedWeights(PruningDiagnosis[Zeros]):
    """A model of `prune_weights` without fine-tuning, some of whose weights are put back."""

    put_back: ClassVar[str] = "with all of their weights"

    stage: PruneWeights
    module: nn.Module
    zeros: dict[str, float]
    """Tensor → its share of zeros."""
    _pruned: dict[tuple[str, bool], dict[str, torch.Tensor]] = field(
        default_factory=dict, init=False
    )
    """Method, and whether halfway → the tensors with zeros."""

    @classmethod
    def create(
        cls,
        stage: PruneWeights,
        model: EagerModel,
        after: Artifact,
        context: Context,
        points: float,
    ) -> Self:
        """Prune the model again, and rank its layers by what zeros in each alone change.

        Args:
            stage: the stage with its settings.
            model: the model that it reads.
            after: what it made; its facts have the share of zeros of each tensor.
            context: data, metric and seed of the run.
            points: what the refused gate allows.
        """
        recorded: Any = after.manifest.facts["zeros"]
        zeros = {name: share for name, share in recorded["by_weight"].items() if share > 0}
        halves = cls.halves(model, context)
        found = cls(model, context, *halves, stage, model.load(), zeros)
        batches = list(halves[0].data.batches("val", limit=RANKED_ON))
        errors = {}
        for name in zeros:
            alone = found.changed_module(replace(found.own, back=frozenset(zeros) - {name}))
            errors[name] = output_error(alone, found.module, batches, context.device)
        found.begin(sorted(zeros, key=lambda name: -errors[name]), points)
        return found

    @property
    def own(self) -> Zeros:
        """The zeros of the stage."""
        return Zeros(self.stage.method, batch_norm=self.stage.batch_norm == "reestimate")

    @property
    def notice(self) -> str:  # type: ignore[override]
        """That fine-tuning is left out, where there is some."""
        return "layers are judged before fine-tuning" if self.stage.finetune else ""

    def remedies(self, layers: Sequence[str]) -> Iterator[tuple[str, Callable[[Zeros], Zeros]]]:
        """Yield what costs nothing first: BatchNorm statistics, then the method."""
        if not self.own.batch_norm and batch_norms(self.module):
            yield "stale_batch_norm", lambda zeros: replace(zeros, batch_norm=True)
        if self.own.method != BEST_METHOD:
            yield "poor_method", lambda zeros: replace(zeros, method=BEST_METHOD)
        if layers and not self.spread:
            yield "layer_too_sparse", lambda zeros: replace(zeros, back=frozenset(layers))
        elif self.stage.amount is not None:
            yield "amount_too_high", lambda zeros: replace(zeros, halfway=True)

    def statistics_shift(self) -> float:
        """Return how far BatchNorm statistics are from those of the pruned model, in deviations."""
        module = self.changed_module(self.own)
        return batch_norm_shift(module, self._calibration, self.context.device)

    def changed_module(self, variant: Zeros) -> nn.Module:
        """Return the module with the zeros of a variant."""
        module = copy_module(self.module)
        pruned = self._pruned_tensors(variant.method, variant.halfway)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name in pruned.keys() - variant.back:
                parameters[name].copy_(pruned[name])
        if variant.batch_norm:
            reestimate_batch_norms_(module, self._calibration, self.context.device)
        return module.eval()

    @cached_property
    def _calibration(self) -> list[Batch]:
        return usual_calibration(self.context)

    def _pruned_tensors(self, method: str, halfway: bool) -> dict[str, torch.Tensor]:
        """Return the tensors that the stage changes, pruned by a method without fine-tuning."""
        key = method, halfway
        if key not in self._pruned:
            # Without training, its schedule and what follows it.
            left_out = ("finetune", "schedule", "until", "updates", "batch_norm")
            changes: dict[str, Any] = {**dict.fromkeys(left_out), "method": method}
            if halfway and self.stage.amount is not None:
                changes["amount"] = self.stage.amount / 2
            if method == BEST_METHOD:
                # All there are: of a method that draws none, more may be set than the split has.
                changes |= {"scope": None, "calibration_samples": None}
            model: Any = self.model
            with self.context.in_temporary_folder() as context:
                made = self.stage.with_settings(changes).run(model, context)
                parameters = dict(made.load().named_parameters(remove_duplicate=False))
            self._pruned[key] = {
                name: parameters[name].detach() for name in self.zeros if name in parameters
            }
        return self._pruned[key]

    def _drop_on(self, half: HalfOfVal, layers: Collection[str]) -> float:
        if set(layers) >= self.zeros.keys():
            return 0.0  # the model that is compared with
        variant = replace(self.own, back=frozenset(layers))
        return self._judge_module(half, self.changed_module(variant))
