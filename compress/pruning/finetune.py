"""Training after a cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from compress.training.config.training import Training
from compress.training.objectives.teacher_objective import Teaching  # noqa: TC001 - a field's type

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context
    from compress.core.loss import Loss
    from compress.training.objectives.objective import Objective
    from compress.training.objectives.weight_constraint import Constraint
    from compress.training.result import Fit


class Finetune(Training):
    """How the smaller model is trained after a cut; `epochs` alone is enough."""

    teaching: Teaching | None = None
    """How the model learns from the answers of the model before the cut; without it from labels
    alone. Data without labels needs it."""

    @property
    def uses_targets(self) -> bool:
        """Whether the loss on the targets is part of what is minimized."""
        return self.teaching is None or self.teaching.labels_weight > 0

    def check_loss(self, loss: Loss) -> None:
        """Refuse settings that do not go with the task's loss."""
        if self.uses_targets:
            self.check_targets_loss(loss)
        if self.teaching is not None:
            self.teaching.check_loss(loss)

    def objective(self, teacher: EagerModel, context: Context) -> Objective:
        """Return what the training minimizes.

        Args:
            teacher: the model before the cut.
            context: the task's loss, and the data.
        """
        from compress.training.objectives.objective import TargetLoss

        targets = TargetLoss.for_training(self, context)
        return targets if self.teaching is None else self.teaching.objective(teacher, targets)


def _any_training(given: Any) -> Any:
    if isinstance(given, Training) and not isinstance(given, Finetune):
        return {name: getattr(given, name) for name in given.model_fields_set}
    return given


AnyFinetune = Annotated[Finetune, BeforeValidator(_any_training)]
"""Settings of a fine-tuning, also given as those of a training."""


def finetune(
    start: EagerModel,
    unpruned: EagerModel,
    training: Finetune,
    context: Context,
    task: str,
    constraint: Constraint | None = None,
) -> Fit:
    """Train a pruned model; it stays as it was unless an epoch is better by the metric.

    Args:
        start: the pruned model.
        unpruned: the model it was made from, which teaches where there is teaching.
        training: the hyper-parameters.
        context: data, metric, device and seed.
        task: what the progress is shown as.
        constraint: what the weights must satisfy in every step.
    """
    from compress.training.fit import fit

    accept_start = constraint is None or constraint.is_met(0.0)
    return fit(
        start,
        training,
        training.objective(unpruned, context),
        context,
        task,
        accept_start=accept_start,
        constraint=constraint,
    )
