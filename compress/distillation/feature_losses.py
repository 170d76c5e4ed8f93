"""Settings of the loss terms that compare hidden features."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import model_validator

from compress.common.config import Positive  # noqa: TC001 - a setting's type
from compress.distillation.terms import Modules, OutputPair, Term, Weight

if TYPE_CHECKING:
    import torch

    from compress.distillation.terms import FeaturePair


class FeatureTerm(Term):
    """A term that compares features of modules, or the outputs if it names no modules."""

    student: Modules | None = None
    """Modules of the student, by name, several as a list or as a pattern in which `*` is one part
    of a name (`encoder.layer.*`); the outputs by default."""
    teacher: Modules | None = None
    """The teacher's; the same names by default. Of more than the student's, such as all layers,
    evenly spaced ones are taken, the last among them (Jiao et al., "TinyBERT", 2020)."""
    needs_equal_outputs: ClassVar[bool] = False

    @property
    def modules(self) -> tuple[Modules, Modules] | None:
        """Modules of the student and of the teacher."""
        return None if self.student is None else (self.student, self.teacher or self.student)

    def compute(self, outputs: OutputPair, features: list[FeaturePair]) -> torch.Tensor:
        """Return the mean distance over the pairs of features."""
        distances = [self.distance(student, teacher) for student, teacher in features]
        return sum(distances[1:], start=distances[0]) / len(distances)

    def distance(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the distance of two features, a scalar."""
        raise NotImplementedError

    def compares(self, student: torch.Size, teacher: torch.Size) -> bool:
        """Whether features of two shapes can be compared; the student's shape after projection."""
        return True

    @model_validator(mode="after")
    def _teacher_is_beside_student(self) -> Self:
        if self.teacher is not None and self.student is None:
            raise ValueError(
                "teacher names modules and student names none; name those of the student they are "
                "compared with"
            )
        return self


class Relational(FeatureTerm):
    """Distances between samples, and angles at each, of the batch (Park et al., 2019, RKD)."""

    loss: Literal["relational"]
    """Which term this is."""
    # Both weights are the paper's.
    distance_weight: Weight = 1.0
    """Weight of the distances, which are in units of their mean."""
    angle_weight: Weight = 2.0
    """Weight of the angles."""

    def distance(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of both losses."""
        from compress.distillation.losses import relational_angles, relational_distances

        total = self.distance_weight * relational_distances(student, teacher)
        if self.angle_weight:  # cubic in the batch size
            total = total + self.angle_weight * relational_angles(student, teacher)
        return total


class ProjectedTerm(FeatureTerm):
    """A term that needs equal shapes, for which the student's features may be projected."""

    projection: Literal["auto", "linear", "none"] = "auto"
    """Whether the student's channels go through a learned linear map: always (`linear`), never, or
    where their number differs from the teacher's (`auto`)."""

    @property
    def projects(self) -> str:
        """When the student's features are projected."""
        return self.projection

    def compares(self, student: torch.Size, teacher: torch.Size) -> bool:
        """Whether shapes are equal."""
        return student == teacher


class Hint(ProjectedTerm):
    """Distance of hidden features (Romero et al., 2015, FitNets).

    Projections are trained beside the student and dropped in the end.
    """

    loss: Literal["hint"]
    """Which term this is."""
    compare: Literal["mse", "cosine"] = "mse"
    """How features are compared: by `mse`, or by the `cosine` of channels."""

    def distance(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the distance of features."""
        from compress.distillation.losses import hint_distance

        return hint_distance(student, teacher, self.compare)


class Attention(FeatureTerm):
    """Where features are large: squared and summed over channels (Zagoruyko, Komodakis, 2017).

    Maps have length 1, so that a weight near 1 is right, where the paper's means ask for 1000.
    """

    loss: Literal["attention"]
    """Which term this is."""
    student: Modules
    """Modules of the student, by name, several as a list or as a pattern in which `*` is one part
    of a name (`layers.*`)."""

    def distance(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the distance of attention maps."""
        from compress.distillation.losses import attention_distance

        return attention_distance(student, teacher)

    def compares(self, student: torch.Size, teacher: torch.Size) -> bool:
        """Whether both are images, or have equally many tokens."""
        images = len(student) == len(teacher) == 4
        return images or (len(student) == len(teacher) == 3 and student[1] == teacher[1])


class Similarity(FeatureTerm):
    """Which samples of the batch resemble each other (Tung and Mori, 2019)."""

    loss: Literal["similarity"]
    """Which term this is."""

    def distance(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the distance of similarities."""
        from compress.distillation.losses import similarity_distance

        return similarity_distance(student, teacher)


class Contrastive(ProjectedTerm):
    """How well a sample's teacher features are distinguished from those of other samples.

    After Tian et al. (2020), with the batch as negatives.
    """

    loss: Literal["contrastive"]
    """Which term this is."""
    temperature: Positive = 0.1
    """Temperature of the softmax over cosines; smaller is sharper."""

    def distance(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the contrastive loss."""
        from compress.distillation.losses import contrastive_distance

        return contrastive_distance(student, teacher, self.temperature)
