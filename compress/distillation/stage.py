"""The stage that trains a model on another model's answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from compress.core.eager import EagerModel
from compress.core.errors import StageFailed
from compress.core.stage import Stage
from compress.training.settings import Training

if TYPE_CHECKING:
    from compress.core.stage import Context


class Distill(Stage[EagerModel, EagerModel], Training):
    """Train a model to answer as its teacher does; unlabelled data teaches too."""

    stage: Literal["distill"] = "distill"
    teacher: str
    """Earlier stage whose model teaches, or `source`."""
    temperature: Annotated[float, Field(gt=0)] = 4.0
    """How far both models' distributions are softened before they are compared."""
    soft_weight: Annotated[float, Field(gt=0)] = 0.9
    """Weight of the teacher's answers."""
    hard_weight: Annotated[float, Field(ge=0)] = 0.1
    """Weight of the labels; 0 leaves them out, and data without labels has no such term."""

    @property
    def needs_data(self) -> bool:
        """Always."""
        return True

    @property
    def also_reads(self) -> tuple[str, ...]:
        """The teacher's name."""
        return (self.teacher,)

    def run(self, model: EagerModel, context: Context) -> EagerModel:
        """Train against the teacher; the input's weights are kept where no epoch beats them.

        Raises:
            StageFailed: the teacher is no eager model or has other outputs, or training failed.
        """
        from compress.distillation.objective import FromTeacher
        from compress.training.fit import fit

        teacher = self._teacher(context)
        objective = FromTeacher(
            teacher=teacher.path.absolute(),
            teacher_digest=teacher.digest,
            temperature=self.temperature,
            soft_weight=self.soft_weight,
            hard_weight=self.hard_weight,
            label_smoothing=self.label_smoothing,
            class_weights=self.class_weights,
        )
        learnt = fit(model, self, objective, context, self.title, accept_start=True)
        lineage = self.lineage(model, teacher=teacher)
        return model.derive(context.root, learnt.module, lineage=lineage, facts=learnt.facts())

    def _teacher(self, context: Context) -> EagerModel:
        teacher = context.named(self.teacher)
        if not isinstance(teacher, EagerModel):
            raise StageFailed(
                f"{self.title}: teacher {self.teacher!r} is a {teacher.kind!r} artifact, expected "
                "an eager model; name a stage before quantization and export, or source"
            )
        return teacher
