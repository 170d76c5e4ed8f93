"""The stage that removes whole channels, heads and neurons."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from compress.core.eager import EagerModel
from compress.core.errors import StageFailed
from compress.core.recipe import KeepIndices
from compress.core.settings import Ratio
from compress.core.stage import Stage
from compress.training.settings import Training

if TYPE_CHECKING:
    import torch
    from pydantic import JsonValue

    from compress.core.stage import Context
    from compress.pruning.plan import ChannelCut

log = logging.getLogger(__name__)

REASONS_SHOWN = 3


class PruneChannels(Stage[EagerModel, EagerModel]):
    """Remove whole channels, heads and neurons, so that the model is really smaller and faster.

    Which channels belong together is read from the model's own graph; no layer has to be annotated.
    Every cut is proven to answer as the model with the same channels silenced. What cannot be
    proven stays, with the reason among the facts.
    """

    stage: Literal["prune_channels"] = "prune_channels"
    ratio: Ratio
    """Fraction of the channels to remove, in every place where they can be removed."""
    importance: Literal["l1", "l2", "random"] = "l2"
    """How channels are ranked: by the `l1` or `l2` norm of all their weights, or at `random`."""
    round_to: Annotated[int, Field(gt=0)] = 16
    """Keep multiples of this many channels; of fewer in layers narrower than twice as many."""
    exclude: tuple[str, ...] = ()
    """Names of modules whose channels all stay; `*` matches any characters."""
    calibration_samples: Annotated[int, Field(ge=0)] = 0
    """Samples on which BatchNorm statistics are averaged anew after the cut; 0 leaves them."""
    finetune: Training | None = None
    """How the smaller model is trained; it stays as it was cut unless an epoch is better."""

    @property
    def needs_data(self) -> bool:
        """Whether there is fine-tuning or averaging to do."""
        return self.finetune is not None or self.calibration_samples > 0

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        """Cut, average BatchNorm statistics anew, and fine-tune.

        Raises:
            PipelineInvalid: a pattern of ``exclude`` matches no module.
            StageFailed: the model cannot be traced, nothing can be removed, or there is no data
                for what follows the cut.
        """
        if self.needs_data:
            context.need_data(f"{self.title} with finetune or calibration_samples")
        module = model.load()
        cut = self._plan(module, model, context)
        edit = KeepIndices(kept=cut.kept, attributes=dict(cut.attributes))
        facts = _facts(cut)
        edit.apply_(module)
        if self.calibration_samples:
            self._repair_(module, context)
        if self.finetune is not None:
            start = model.derive(context.work / "cut", module, edit=edit)
            module, training = self._finetune(start, self.finetune, context)
            facts |= training
        lineage = self.lineage(model)
        return model.derive(context.root, module, edit=edit, lineage=lineage, facts=facts)

    def _plan(self, module: torch.nn.Module, model: EagerModel, context: Context) -> ChannelCut:
        from compress.pruning.plan import plan_cut

        cut = plan_cut(
            module,
            model.signature.example(seed=context.seed),
            ratio=self.ratio,
            importance=self.importance,
            round_to=self.round_to,
            exclude=self.exclude,
            seed=context.seed,
        )
        if not cut.families:
            reasons = [f"{name}: {reason}" for name, reason in cut.pinned.items()]
            more = f" and {len(reasons) - REASONS_SHOWN} more" * (len(reasons) > REASONS_SHOWN)
            found = "; ".join(reasons[:REASONS_SHOWN]) or "it has no layer with channels"
            raise StageFailed(f"{self.title}: no channel can be removed ({found}{more})")
        before, after = (sum(getattr(f, end) for f in cut.families) for end in ("before", "after"))
        log.info("%s: %d of %d channels stay", self.title, after, before)
        return cut

    def _repair_(self, module: torch.nn.Module, context: Context) -> None:
        from compress.pruning.repair import reestimate_batch_norms_

        data = context.need_data("averaging BatchNorm statistics")
        batches = data.calibration(self.calibration_samples, context.seed)
        reestimate_batch_norms_(module, batches, context.device)

    def _finetune(
        self, start: EagerModel, training: Training, context: Context
    ) -> tuple[torch.nn.Module, dict[str, JsonValue]]:
        from compress.training.fit import fit
        from compress.training.objective import CrossEntropy

        objective = CrossEntropy(training.label_smoothing, training.class_weights)
        fitted = fit(start, training, objective, context, self.title, accept_start=True)
        return fitted.module, fitted.facts()


def _facts(cut: ChannelCut) -> dict[str, JsonValue]:
    """Return what was cut and what was not, and why."""
    return {
        "families": [
            {"modules": list(f.family.producers), "before": f.before, "after": f.after}
            for f in cut.families
        ],
        "pinned": dict(cut.pinned),
    }
