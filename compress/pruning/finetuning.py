"""Training after a cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator

from compress.training.settings import Training
from compress.training.teaching import Teaching  # noqa: TC001 - a field's type

if TYPE_CHECKING:
    from compress.core.eager import EagerModel
    from compress.core.stage import Context
    from compress.training.constraint import Constraint
    from compress.training.objective import Objective
    from compress.training.outcome import Fit


class Finetune(Training):
    """How the smaller model is trained after a cut; `epochs` alone is enough."""

    teaching: Teaching | None = None
    """How the model learns from the answers of the model before the cut; without it from labels
    alone. Data without labels needs it."""

    def objective(self, teacher: EagerModel) -> Objective:
        """Return what the training makes small.

        Args:
            teacher: the model before the cut.
        """
        if self.teaching is not None:
            return self.teaching.objective(teacher, self)
        from compress.training.objective import CrossEntropy

        return CrossEntropy(self.label_smoothing, self.class_weights)


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
        training.objective(unpruned),
        context,
        task,
        accept_start=accept_start,
        constraint=constraint,
    )
