"""Terms of a distillation's loss that compare outputs, as settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from compress.common.config import Positive, Settings

if TYPE_CHECKING:
    import torch

    from compress.training.objectives.objective import TargetMean

    Pair = tuple[torch.Tensor, torch.Tensor]

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Modules = str | tuple[str, ...]


@dataclass(frozen=True)
class OutputPair:
    """What student and teacher said about a batch."""

    student: torch.Tensor
    """The student's first output."""
    teacher: torch.Tensor
    """The teacher's first output."""
    target: torch.Tensor | None
    """Labels, -100 where there is none, or floats, NaN where there are none."""
    targets_loss: TargetMean | None = None
    """The mean over all samples of the task's loss."""


class Term(Settings):
    """A term that compares outputs."""

    weight: Positive = 1.0
    """What the term is multiplied by."""

    needs_equal_outputs: ClassVar[bool] = True
    compares_classes: ClassVar[bool] = False
    """Whether outputs are taken for the logits of classes, on axis 1."""

    def of(self, said: OutputPair, pairs: list[Pair]) -> torch.Tensor:
        """Return the term before it is weighted.

        Args:
            said: outputs and labels.
            pairs: features of the student and the teacher, of each pair of modules that the term
                names; where it names none, the outputs.
        """
        raise NotImplementedError

    @property
    def modules(self) -> tuple[Modules, Modules] | None:
        """Modules of the student and of the teacher whose outputs are compared, if any are."""
        return None

    @property
    def projects(self) -> str:
        """Whether features of the student are projected: `auto`, `linear` or `none`."""
        return "none"


class Labels(Term):
    """The pipeline's loss on the targets; samples without one add nothing to it."""

    loss: Literal["labels"]
    """Which term this is."""
    needs_equal_outputs: ClassVar[bool] = False

    def of(self, said: OutputPair, pairs: list[Pair]) -> torch.Tensor:
        """Return the loss, 0 where no sample has a target."""
        if said.target is None or said.targets_loss is None:
            return said.student.new_zeros(())
        return said.targets_loss(said.student, said.target)


class Kl(Term):
    """Divergence of softened distributions, times T squared (Hinton et al., 2015)."""

    loss: Literal["kl"]
    """Which term this is."""
    compares_classes: ClassVar[bool] = True
    temperature: Positive = 4.0
    """How far both distributions are softened before they are compared."""

    def of(self, said: OutputPair, pairs: list[Pair]) -> torch.Tensor:
        """Return the divergence."""
        from compress.training.objectives.teacher_objective import soft_cross_entropy

        return soft_cross_entropy(said.student, said.teacher, self.temperature)


class Dkd(Term):
    """Divergence of "target or not", and of the other classes (Zhao et al., 2022).

    A sample without a label has the teacher's best class as its target.
    """

    loss: Literal["dkd"]
    """Which term this is."""
    compares_classes: ClassVar[bool] = True
    temperature: Positive = 4.0
    """How far both distributions are softened before they are compared."""
    target_weight: Weight = 1.0
    """Weight of "target or not"; the paper's alpha."""
    other_weight: Weight = 8.0
    """Weight of the other classes among themselves; the paper's beta."""

    def of(self, said: OutputPair, pairs: list[Pair]) -> torch.Tensor:
        """Return the weighted divergence."""
        from compress.distillation.losses import decoupled_divergence
        from compress.training.objectives.teacher_objective import need_classes

        need_classes(self.loss, said.teacher)
        target = said.teacher.argmax(1)
        if said.target is not None and said.target.shape == said.teacher.shape:
            target = said.target.nan_to_num(-1).argmax(1).where(~said.target.isnan().any(1), target)
        elif said.target is not None:
            target = target.where(said.target < 0, said.target)
        return decoupled_divergence(
            said.student,
            said.teacher,
            target,
            temperature=self.temperature,
            target_weight=self.target_weight,
            other_weight=self.other_weight,
        )


class Dist(Term):
    """Correlation of probabilities, between classes and within each (Huang et al., 2022, DIST).

    For teachers much stronger than the student. Classes are compared over the batch.
    """

    loss: Literal["dist"]
    """Which term this is."""
    compares_classes: ClassVar[bool] = True
    temperature: Positive = 1.0
    """How far both distributions are softened before they are compared."""
    between_weight: Weight = 1.0
    """Weight of how classes relate for a sample (inter-class; the paper's beta)."""
    within_weight: Weight = 1.0
    """Weight of how samples relate for a class (intra-class; the paper's gamma)."""

    def of(self, said: OutputPair, pairs: list[Pair]) -> torch.Tensor:
        """Return the weighted distance."""
        from compress.distillation.losses import correlation_distance
        from compress.training.objectives.teacher_objective import need_classes

        need_classes(self.loss, said.teacher)
        return correlation_distance(
            said.student,
            said.teacher,
            temperature=self.temperature,
            between_weight=self.between_weight,
            within_weight=self.within_weight,
        )


class Mse(Term):
    """Mean squared difference of outputs: of logits, or of embeddings."""

    loss: Literal["mse"]
    """Which term this is."""

    def of(self, said: OutputPair, pairs: list[Pair]) -> torch.Tensor:
        """Return the mean."""
        from compress.training.objectives.teacher_objective import squared_error

        return squared_error(said.student, said.teacher)


class Cosine(Term):
    """One minus the cosine of outputs, for embeddings."""

    loss: Literal["cosine"]
    """Which term this is."""

    def of(self, said: OutputPair, pairs: list[Pair]) -> torch.Tensor:
        """Return the mean."""
        from compress.training.objectives.teacher_objective import cosine_distance

        return cosine_distance(said.student, said.teacher)
