"""The stage that trains a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from compress.artifacts.eager_model import EagerModel
from compress.core.stage import Stage
from compress.training.config.training import Training
from compress.training.objectives.objective import TargetLoss

if TYPE_CHECKING:
    from compress.core.context import Context
    from compress.core.objectives.loss import Loss


class Train(Stage[EagerModel, EagerModel], Training):
    """Train a model's weights on labelled data.

    As the first stage, or after one that changed the model and has no `finetune` of its own.

        - stage: train
          epochs: 12
          optimizer: adamw
          schedule: cosine
          parallel: {processes: 2}
    """

    stage: Literal["train"] = "train"

    needs_data: ClassVar[bool] = True
    uses_loss: ClassVar[bool] = True

    def check_loss(self, loss: Loss) -> None:
        """Refuse settings that the loss does not have."""
        self.check_targets_loss(loss)

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        """Train with the task's loss and save the best, or last, weights."""
        from compress.training.fit import fit

        objective = TargetLoss.for_training(self, context, model.signature)
        trained = fit(model, self, objective, context, self.title)
        return model.derive(
            context.root, trained.weights, lineage=self.lineage(model), facts=trained.facts()
        )
