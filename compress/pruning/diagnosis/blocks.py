"""A model of `prune_layers` whose blocks are put back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

from compress.artifacts.recipe import KeepBlocks
from compress.pruning.depth.block_search import all_blocks, kept_without
from compress.pruning.diagnosis.attribution import PruningDiagnosis, batch_norm_shift
from compress.pruning.recovery.recovery import (
    batch_norms,
    output_error,
    recover_without_blocks_,
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
    from compress.pruning.prune_layers import PruneLayers


@dataclass(frozen=True)
class Removed:
    """Which blocks a model lacks."""

    back: frozenset[str] = frozenset()
    """Blocks that are there again."""
    batch_norm: bool = False
    """Whether BatchNorm statistics are re-estimated."""
    refit: bool = False
    """Whether the layers behind are refitted, and the statistics re-estimated."""


@dataclass
class RemovedBlocks(PruningDiagnosis[Removed]):
    """A model of `prune_layers` without fine-tuning, some of whose blocks are put back."""

    parts: ClassVar[str] = "blocks"
    put_back: ClassVar[str] = "back"

    stage: PruneLayers
    removed: tuple[str, ...]
    """Blocks that the stage has removed, in order."""

    @classmethod
    def create(
        cls,
        stage: PruneLayers,
        model: EagerModel,
        after: Artifact,
        context: Context,
        points: float,
    ) -> Self:
        """Rank the blocks that were removed; the last ones cost most.

        Args:
            stage: the stage with its settings.
            model: the model that it reads.
            after: what it made; its facts name the blocks.
            context: data, metric and seed of the run.
            points: what the refused gate allows.
        """
        recorded: Any = after.manifest.facts["removed"]
        removed = tuple(step["block"] for step in recorded)
        found = cls(model, context, *cls.halves(model, context), stage, removed)
        found.begin([*reversed(removed)], points)
        return found

    @property
    def own(self) -> Removed:
        """The blocks that the stage removes."""
        return Removed(refit=self.stage.refit)

    @property
    def notice(self) -> str:  # type: ignore[override]
        """That fine-tuning is left out, where there is some."""
        return "blocks are judged before fine-tuning" if self.stage.finetune else ""

    def remedies(self, layers: Sequence[str]) -> Iterator[tuple[str, Callable[[Removed], Removed]]]:
        """Yield BatchNorm statistics, a refit, then the blocks themselves."""
        if not self.own.refit and batch_norms(self.model_module):
            yield "stale_batch_norm", lambda removed: replace(removed, batch_norm=True)
        if not self.own.refit:
            yield "no_refit", lambda removed: replace(removed, refit=True)
        if layers:
            yield "block_needed", lambda removed: replace(removed, back=frozenset(layers))

    def statistics_shift(self) -> float:
        """Return how far BatchNorm statistics are from those of the pruned model, in deviations."""
        return batch_norm_shift(
            self.changed_module(self.own), self._calibration, self.context.device
        )

    def changed_module(self, variant: Removed) -> nn.Module:
        """Return the module without the blocks of a variant."""
        module = self._load()
        gone = [b for b in all_blocks(module) if b.name in {*self.removed} - variant.back]
        kept = kept_without(module, gone)
        if gone:
            KeepBlocks(kept=kept).apply_(module)
        if variant.refit and gone:
            device = self.context.device
            recover_without_blocks_(module, self._load(), kept, self._calibration, device)
        elif variant.batch_norm:
            reestimate_batch_norms_(module, self._calibration, self.context.device)
        return module.eval()

    def refit_gain(self) -> float:
        """Return by how many times a refit lowers the error of the outputs."""
        errors = [
            output_error(
                self.changed_module(variant), self._load(), self._calibration, self.context.device
            )
            for variant in (self.own, replace(self.own, refit=True))
        ]
        return errors[0] / max(errors[1], 1e-12)

    @cached_property
    def model_module(self) -> nn.Module:
        """The module before blocks are removed."""
        return self._load()

    @cached_property
    def _calibration(self) -> list[Batch]:
        return usual_calibration(self.context)

    def _load(self) -> nn.Module:
        model: Any = self.model
        module: nn.Module = model.load()
        return module

    def _drop_on(self, half: HalfOfVal, layers: Collection[str]) -> float:
        if set(layers) >= set(self.removed):
            return 0.0  # the model that is compared with
        return self._judge_module(
            half, self.changed_module(replace(self.own, back=frozenset(layers)))
        )
