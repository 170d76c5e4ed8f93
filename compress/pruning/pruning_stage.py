"""Fine-tuning of a pruned model, and the base of the stages that prune."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from compress.artifacts.eager_model import EagerModel
from compress.core.stage import Stage
from compress.training.config.training import Training
from compress.training.objectives.objective import Constraint, Objective, TargetLoss, Teaching

if TYPE_CHECKING:
    from compress.core.context import Context
    from compress.core.objectives.loss import Loss
    from compress.training.fit import Fit


class Finetune(Training):
    """How a pruned model is trained; `epochs` alone is enough."""

    teaching: Teaching | None = None
    """How the model learns from the outputs of the unpruned model; without it from labels alone.
    Data without labels needs it."""

    @property
    def uses_targets(self) -> bool:
        """Whether the loss on the targets is part of the training objective."""
        return self.teaching is None or self.teaching.labels_weight > 0

    def check_loss(self, loss: Loss) -> None:
        """Refuse settings that cannot be combined with the task's loss."""
        if self.uses_targets:
            self.check_targets_loss(loss)
        if self.teaching is not None:
            self.teaching.check_loss(loss)


def _any_training(given: Any) -> Any:
    if isinstance(given, Training) and not isinstance(given, Finetune):
        return dict(given)
    return given


AnyFinetune = Annotated[Finetune, BeforeValidator(_any_training)]
"""Settings of a fine-tuning; those of a plain training are accepted too."""


class PruningStage(Stage[EagerModel, EagerModel]):
    """Base of the stages that prune a model and may then fine-tune it."""

    if TYPE_CHECKING:
        # Each stage declares this field itself: one of a base class would come first in the
        # settings, whose order is part of the JSON schema and the recorded settings.
        finetune: AnyFinetune | None

    @property
    def uses_loss(self) -> bool:
        """Whether fine-tuning minimizes the loss on targets."""
        return self.finetune is not None and self.finetune.uses_targets

    def check_loss(self, loss: Loss) -> None:
        """Refuse settings that cannot be combined with the task's loss."""
        if self.finetune is not None:
            self.finetune.check_loss(loss)


def finetune(
    start: EagerModel,
    unpruned: EagerModel,
    training: Finetune,
    context: Context,
    task: str,
    constraint: Constraint | None = None,
) -> Fit:
    """Train a pruned model; its weights change only if an epoch improves the metric.

    ``unpruned`` is the teacher if ``training.teaching`` is set. Progress is shown under ``task``.
    ``constraint`` is a condition that the weights must satisfy after every step.
    """
    from compress.distillation.distillation_objective import DistillationObjective
    from compress.training.fit import fit

    targets = TargetLoss.for_training(training, context, unpruned.signature)
    objective: Objective = targets
    if training.teaching is not None:
        objective = DistillationObjective.from_teaching(training.teaching, unpruned, targets)
    accepts = constraint is None or constraint.is_met(0.0)
    return fit(
        start, training, objective, context, task, accept_start=accepts, constraint=constraint
    )
