"""The stage that removes whole channels, heads and neurons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from compress.artifacts.eager_model import EagerModel
from compress.common.config import Count, Ratio
from compress.core.loss import refuse_without_curvature
from compress.core.stage import Stage
from compress.pruning.allocation.targets import Target
from compress.pruning.finetune import Finetune
from compress.pruning.importance.criteria import FROM_DATA, OF_GRADIENTS, Criterion
from compress.training.config.training import Training

if TYPE_CHECKING:
    from compress.core.context import Context
    from compress.core.loss import Loss


class PruneChannels(Stage[EagerModel, EagerModel]):
    """Remove whole channels, heads and neurons, so that the model is really smaller and faster.

    Which channels belong together is read from the model's own graph; no layer has to be annotated.
    Every cut is proven to answer as the model with the same channels silenced. What cannot be
    proven stays, with the reason among the facts.
    """

    stage: Literal["prune_channels"] = "prune_channels"
    ratio: Ratio | None = None
    """Fraction of the channels to remove, in every place where they can be removed."""
    target: Target | None = None
    """Instead of `ratio`: what share of the model's cost remains."""
    importance: Criterion = "l2"
    """How channels are ranked. By weights: `l1` or `l2` norm, `fpgm` (distance to the others),
    `lamp`, `bn_scale`, `random`. By calibration samples: `taylor` and `hessian` (change of the
    loss, of the outputs without labels), `wanda` (weight times activation), `obs` (error that the
    next layers cannot make up for)."""
    scope: Literal["uniform", "global", "isomorphic"] = "uniform"
    """Among which channels the least important are looked for: within each family, all of them, or
    families of the same structure together."""
    max_ratio: Ratio = 0.8
    """Largest fraction of a family that leaves with scope `global` or `isomorphic`."""
    round_to: Count = 16
    """Keep multiples of this many channels; of fewer in layers narrower than twice as many."""
    min_channels: Count = 1
    """Channels of a family that stay in any case."""
    include: tuple[str, ...] = ()
    """Names of modules; where there are any, only channels that they make leave."""
    exclude: tuple[str, ...] = ()
    """Names of modules whose channels all stay; `*` matches any characters."""
    on_unverified: Literal["pin", "error"] = "pin"
    """Whether channels whose cut cannot be proven stay, or stop the stage."""
    iterations: Count = 1
    """Cuts in which the channels leave, a like number in each; importance is judged anew, and
    layers are refitted and the model fine-tuned, after each."""
    refit: bool = True
    """Whether the layers after a cut are refitted by least squares, so that they answer as before:
    no training and no labels. Without data there is none."""
    calibration_samples: Annotated[int, Field(ge=0)] | None = None
    """Samples on which importance is judged, layers are refitted and BatchNorm statistics averaged
    anew. By default 512, or all there are; 0 does nothing of it, and cuts are still proven on a few
    samples."""
    finetune: Finetune | None = None
    """How the smaller model is trained; it stays as it was cut unless an epoch is better."""

    @field_validator("finetune", mode="before")
    @classmethod
    def _any_training(cls, given: Any) -> Any:
        if isinstance(given, Training) and not isinstance(given, Finetune):
            return {name: getattr(given, name) for name in given.model_fields_set}
        return given

    @model_validator(mode="after")
    def _ratio_or_target(self) -> Self:
        if (self.ratio is None) == (self.target is None):
            found = "neither" if self.ratio is None else "both"
            raise ValueError(f"prune_channels needs ratio or target, found {found}; keep one")
        return self

    @model_validator(mode="after")
    def _goes_with_scope(self) -> Self:
        if self.scope == "uniform" and "max_ratio" in self.model_fields_set:
            raise ValueError("max_ratio is for scope global or isomorphic, found uniform")
        if self.scope != "uniform" and self.ratio and self.ratio > self.max_ratio:
            raise ValueError(
                f"ratio {self.ratio:g} is above max_ratio {self.max_ratio:g}, more than any family "
                "may lose; raise max_ratio"
            )
        return self

    @model_validator(mode="after")
    def _has_samples(self) -> Self:
        if self.calibration_samples == 0 and self.needs_samples:
            raise ValueError(
                f"{self._needing_data[0]} needs samples, found calibration_samples: 0; leave it out"
            )
        return self

    @property
    def needs_samples(self) -> bool:
        """Whether calibration samples were asked for, and not only welcome."""
        return bool(set(self._needing_data) - {"finetune"})

    @property
    def needs_data(self) -> bool:
        """Whether there is something to judge, repair or train on data."""
        return bool(self._needing_data)

    @property
    def uses_loss(self) -> bool:
        """Whether channels are ranked by derivatives of the loss, or fine-tuning minimizes it."""
        tuned = self.finetune is not None and self.finetune.uses_targets
        return tuned or self.importance in OF_GRADIENTS

    def check_loss(self, loss: Loss) -> None:
        """Refuse settings that do not go with the task's loss."""
        if self.importance == "hessian":
            refuse_without_curvature(loss)
        if self.finetune is not None:
            self.finetune.check_loss(loss)

    @property
    def _needing_data(self) -> list[str]:
        """The settings that need data."""
        asked = {
            f"importance: {self.importance}": self.importance in FROM_DATA,
            "refit": "refit" in self.model_fields_set and self.refit,
            "calibration_samples": bool(self.calibration_samples),
            "finetune": self.finetune is not None,
        }
        return [name for name, needed in asked.items() if needed]

    @property
    def uses_data(self) -> bool:
        """Whether data, where there is any, changes the result: cuts are proven on it."""
        return True

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        """Cut, refit, average BatchNorm statistics anew, and fine-tune.

        Raises:
            PipelineInvalid: a pattern matches no module.
            StageFailed: the model cannot be traced, nothing can be removed, a target cannot be
                reached, or there is no data for what needs it.
        """
        from compress.pruning.channel_pruner import ChannelPruner

        if self.needs_data:
            context.need_data(f"{self.title} with {' and '.join(self._needing_data)}")
        pruner = ChannelPruner(self, model, context)
        for step in range(1, self.iterations + 1):
            context.progress(self.title, step - 1, self.iterations, "plan and prove")
            pruner.prune_step_(step / self.iterations)
        pruner.require_pruned()
        pruner.warn_unless_faster()
        lineage, facts = self.lineage(model), pruner.facts()
        return model.derive(
            context.root, pruner.weights, edits=pruner.edits, lineage=lineage, facts=facts
        )
