"""The terms that a distillation loss can be a sum of, each with its settings and its paper.

Shapes: N samples, C classes, D features. Logits are [N, C, …], classes on axis 1 as for
``cross_entropy``: each position of the axes behind it, such as a pixel, is a sample. Features are
flattened behind the first axis where the relations between samples are compared. Every term is a
scalar that is 0 for equal inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compress.common.config import Positive, Settings
from compress.common.errors import StageFailed
from compress.common.lazy_modules import F, torch
from compress.core.objectives.task import need_tensor

if TYPE_CHECKING:
    from compress.data.targets import Targets
    from compress.training.objectives.objective import TargetMean, Teaching

    FeaturePair = tuple[torch.Tensor, torch.Tensor]

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Modules = str | tuple[str, ...]
WHICH = Field(description="Which term this is.")
# Keeps the square root's gradient finite at 0, and the distances of equal samples from 0 / 0.
TINY = 1e-12


@dataclass(frozen=True)
class OutputPair:
    """First outputs of student and teacher for a batch, and its labels."""

    student: torch.Tensor
    """The student's first output."""
    teacher: torch.Tensor
    """The teacher's first output."""
    target: Targets | None
    """Labels, -100 for none, or floats, NaN for none; None if no sample has a target."""
    student_outputs: Sequence[torch.Tensor] = ()
    """All outputs of the student, which the task's loss may read."""
    targets_loss: TargetMean | None = None
    """The mean over all samples of the task's loss."""


class Term(Settings):
    """A term that compares outputs."""

    weight: Positive = 1.0
    """What the term is multiplied by."""

    needs_equal_outputs: ClassVar[bool] = True
    compares_classes: ClassVar[bool] = False
    """Whether outputs are treated as logits of classes on axis 1."""

    def compute(self, outputs: OutputPair, features: list[FeaturePair]) -> torch.Tensor:
        """Return the term without its weight, a scalar.

        ``features`` are those of student and teacher for each pair of modules that the term names;
        the outputs if it names none.
        """
        raise NotImplementedError

    @property
    def modules(self) -> tuple[Modules, Modules] | None:
        """Modules of student and teacher whose outputs are compared; None for the models."""
        return None

    @property
    def projects(self) -> str:
        """Whether features of the student are projected: `auto`, `linear` or `none`."""
        return "none"


class Labels(Term):
    """The pipeline's loss on the targets; samples without one add nothing to it."""

    loss: Annotated[Literal["labels"], WHICH]
    needs_equal_outputs: ClassVar[bool] = False

    def compute(self, outputs: OutputPair, features: list[FeaturePair]) -> torch.Tensor:
        """Return the task's loss; 0 if no sample has a target."""
        if outputs.target is None or outputs.targets_loss is None:
            return outputs.student.new_zeros(())
        return outputs.targets_loss(outputs.student_outputs or outputs.student, outputs.target)


class Kl(Term):
    """Divergence of softened distributions, times T squared (Hinton et al., 2015)."""

    loss: Annotated[Literal["kl"], WHICH]
    compares_classes: ClassVar[bool] = True
    temperature: Positive = 4.0
    """How far both distributions are softened before they are compared."""

    def compute(self, outputs: OutputPair, features: list[FeaturePair]) -> torch.Tensor:
        """Return the Kullback-Leibler divergence, as a mean over all axes but the classes'.

        After Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network" (2015),
        section 2: gradients of softened targets shrink with 1/T squared, and the factor undoes it.
        """
        _need_classes(self.loss, outputs.student)
        student = F.log_softmax(outputs.student / self.temperature, dim=1)
        teacher = F.log_softmax(outputs.teacher / self.temperature, dim=1)
        divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
        return divergence.mean() * self.temperature**2


class Dkd(Term):
    """Divergence of "target or not", and of the other classes (Zhao et al., 2022).

    A sample without a label has the teacher's best class as its target.
    """

    loss: Annotated[Literal["dkd"], WHICH]
    compares_classes: ClassVar[bool] = True
    temperature: Positive = 4.0
    """How far both distributions are softened before they are compared."""
    target_weight: Weight = 1.0
    """Weight of "target or not"; the paper's alpha."""
    other_weight: Weight = 8.0
    """Weight of the other classes among themselves; the paper's beta."""

    def compute(self, outputs: OutputPair, features: list[FeaturePair]) -> torch.Tensor:
        """Return the KL divergences of "target or not" and of the other classes, times T².

        After Zhao et al., "Decoupled Knowledge Distillation" (2022): plain distillation is this
        with alpha 1 and as beta the teacher's probability of the other classes, which is near zero
        where the teacher is confident.
        """
        _need_classes(self.loss, outputs.teacher)
        target = outputs.teacher.argmax(1)
        labels = None if outputs.target is None else need_tensor("loss dkd", outputs.target)
        if labels is not None and labels.shape == outputs.teacher.shape:
            labelled = ~labels.isnan().any(1)
            target = labels.nan_to_num(-1).argmax(1).where(labelled, target)
        elif labels is not None:
            target = target.where(labels < 0, labels)
        is_target = F.one_hot(target.flatten().long(), outputs.teacher.shape[1]).bool()
        binary, others = self._parts(outputs.student, is_target)
        teacher_binary, teacher_others = self._parts(outputs.teacher, is_target)
        split = F.kl_div(binary, teacher_binary, reduction="batchmean", log_target=True)
        among = F.kl_div(others, teacher_others, reduction="batchmean", log_target=True)
        return (self.target_weight * split + self.other_weight * among) * self.temperature**2

    def _parts(
        self, logits: torch.Tensor, is_target: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of "target or not", and of the other classes by themselves."""
        log_p = F.log_softmax(_class_rows(logits) / self.temperature, dim=1)
        others = log_p[~is_target].view(len(log_p), -1)
        binary = torch.stack([log_p[is_target], others.logsumexp(1)], 1)
        return binary, F.log_softmax(others, dim=1)


class Dist(Term):
    """Correlation of probabilities, between classes and within each (Huang et al., 2022, DIST).

    For teachers much stronger than the student. Classes are compared over the batch.
    """

    loss: Annotated[Literal["dist"], WHICH]
    compares_classes: ClassVar[bool] = True
    temperature: Positive = 1.0
    """How far both distributions are softened before they are compared."""
    between_weight: Weight = 1.0
    """Weight of how classes relate for a sample (inter-class; the paper's beta)."""
    within_weight: Weight = 1.0
    """Weight of how samples relate for a class (intra-class; the paper's gamma)."""

    def compute(self, outputs: OutputPair, features: list[FeaturePair]) -> torch.Tensor:
        """Return one minus Pearson's correlation of probabilities, along classes and along samples.

        After Huang et al., "Knowledge Distillation from A Stronger Teacher" (2022): it matters how
        classes rank for a sample (inter-class), and how samples rank within a class (intra-class).
        """
        _need_classes(self.loss, outputs.teacher)
        student_NC, teacher_NC = (
            (_class_rows(logits) / self.temperature).softmax(1)
            for logits in (outputs.student, outputs.teacher)
        )
        between = _pearson_distance(student_NC, teacher_NC)
        within = _pearson_distance(student_NC.T, teacher_NC.T)
        weighted = self.between_weight * between + self.within_weight * within
        return weighted * self.temperature**2


class Mse(Term):
    """Mean squared difference of outputs: of logits, or of embeddings."""

    loss: Annotated[Literal["mse"], WHICH]

    def compute(self, outputs: OutputPair, features: list[FeaturePair]) -> torch.Tensor:
        """Return the mean."""
        return (outputs.student - outputs.teacher).square().mean()


class Cosine(Term):
    """One minus the cosine of outputs, for embeddings."""

    loss: Annotated[Literal["cosine"], WHICH]

    def compute(self, outputs: OutputPair, features: list[FeaturePair]) -> torch.Tensor:
        """Return the mean."""
        return cosine_distance(outputs.student, outputs.teacher)


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

    loss: Annotated[Literal["relational"], WHICH]
    # Both weights are the paper's.
    distance_weight: Weight = 1.0
    """Weight of the distances, which are in units of their mean."""
    angle_weight: Weight = 2.0
    """Weight of the angles."""

    def distance(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of both losses, RKD-D and RKD-A.

        Park et al., "Relational Knowledge Distillation" (2019).
        """
        apart = F.smooth_l1_loss(_distances(student), _distances(teacher))
        total = self.distance_weight * apart
        if self.angle_weight:  # cubic in the batch size
            turned = F.smooth_l1_loss(_angles(student), _angles(teacher))
            total = total + self.angle_weight * turned
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

    loss: Annotated[Literal["hint"], WHICH]
    compare: Literal["mse", "cosine"] = "mse"
    """How features are compared: by `mse`, or by the `cosine` of channels."""

    def distance(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the distance of (projected) features: "FitNets" of Romero et al. (2015)."""
        if self.compare == "mse":
            return F.mse_loss(student, teacher)
        return cosine_distance(student, teacher)


class Attention(FeatureTerm):
    """Where features are large: squared and summed over channels (Zagoruyko, Komodakis, 2017).

    Maps have length 1, so that a weight near 1 is right, where the paper's means ask for 1000.
    """

    loss: Annotated[Literal["attention"], WHICH]
    student: Modules
    """Modules of the student, by name, several as a list or as a pattern in which `*` is one part
    of a name (`layers.*`)."""

    def distance(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the squared distance of two maps of length 1, as a mean over samples: 0 … 4.

        After Zagoruyko and Komodakis, "Paying More Attention to Attention" (2017). Features are
        (N, C, H, W), the larger map averaged to the size of the smaller one, or tokens (N, T, D).
        """
        maps = [x.square().sum(1 if x.dim() == 4 else -1) for x in (student, teacher)]
        if maps[0].dim() == 3 and maps[0].shape != maps[1].shape:
            height, width = (min(m.shape[axis] for m in maps) for axis in (1, 2))
            maps = [F.adaptive_avg_pool2d(m, (height, width)) for m in maps]
        a, b = (F.normalize(m.flatten(1), dim=1) for m in maps)
        return (a - b).square().sum(1).mean()

    def compares(self, student: torch.Size, teacher: torch.Size) -> bool:
        """Whether both are images, or have equally many tokens."""
        images = len(student) == len(teacher) == 4
        return images or (len(student) == len(teacher) == 3 and student[1] == teacher[1])


class Similarity(FeatureTerm):
    """Which samples of the batch resemble each other (Tung and Mori, 2019)."""

    loss: Annotated[Literal["similarity"], WHICH]

    def distance(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the squared difference of two matrices of inner products, over N².

        After Tung and Mori, "Similarity-Preserving Knowledge Distillation" (2019), with rows of
        length 1.
        """
        rows = (x.flatten(1) for x in (student, teacher))
        own, taught = (F.normalize(x @ x.T, dim=1) for x in rows)
        return (own - taught).square().mean()


class Contrastive(ProjectedTerm):
    """How well a sample's teacher features are distinguished from those of other samples.

    After Tian et al. (2020), with the batch as negatives.
    """

    loss: Annotated[Literal["contrastive"], WHICH]
    temperature: Positive = 0.1
    """Temperature of the softmax over cosines; smaller is sharper."""

    def distance(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Return the InfoNCE loss of finding a sample's teacher features among the batch's.

        InfoNCE after van den Oord et al., "Representation Learning with Contrastive Predictive
        Coding" (2018), between student and teacher as in Tian et al., "Contrastive Representation
        Distillation" (2020). The loss of a student equal to its teacher is subtracted, so that
        equal features give 0.
        """
        s, t = (F.normalize(x.flatten(1), dim=1) for x in (student, teacher))
        own = torch.arange(len(s), device=s.device)
        of_equals = F.cross_entropy(t @ t.T / self.temperature, own)
        return F.cross_entropy(s @ t.T / self.temperature, own) - of_equals


OutputTerm = Labels | Kl | Dkd | Dist | Mse | Cosine
AnyFeatureTerm = Relational | Hint | Attention | Similarity | Contrastive
AnyTerm = Annotated[OutputTerm | AnyFeatureTerm, Field(discriminator="loss")]
"""A term of the loss; the key ``loss`` selects its class."""


def terms_of(teaching: Teaching) -> tuple[AnyTerm, ...]:
    """Return the terms that settings of a teaching stand for."""
    weight = teaching.soft_weight
    soft: AnyTerm
    match teaching.loss:
        case "kl":
            soft = Kl(loss="kl", temperature=teaching.temperature, weight=weight)
        case "mse":
            soft = Mse(loss="mse", weight=weight)
        case "cosine":
            soft = Cosine(loss="cosine", weight=weight)
    if not teaching.labels_weight:
        return (soft,)
    return (soft, Labels(loss="labels", weight=teaching.labels_weight))


def cosine_distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Compute the mean of one minus the cosine between vectors."""
    # The vectors lie on axis 1 of feature maps [N, C, H, W], and else on the last axis.
    axis = 1 if student.dim() == 4 else -1
    return 1 - F.cosine_similarity(student, teacher, dim=axis).mean()


def _need_classes(term: str, logits: torch.Tensor) -> None:
    """Refuse outputs without two classes on axis 1, over which the softmax would always be 1."""
    if logits.dim() < 2 or logits.shape[1] < 2:
        raise StageFailed(
            f"loss: {term} compares probabilities of classes on axis 1, and the outputs have shape "
            f"{tuple(logits.shape)}; use loss: mse"
        )


def _class_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return logits [N, C, …] as rows of classes, one for each place of the other axes."""
    return logits.movedim(1, -1).flatten(0, -2)


def _pearson_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    return 1 - F.cosine_similarity(a, b, dim=1).mean()


def _distances(x: torch.Tensor) -> torch.Tensor:
    """Return the pairwise distances divided by their mean, without the zeros on the diagonal."""
    rows = x.flatten(1)
    squared = (rows[:, None] - rows[None]).square().sum(2)
    apart = ~torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    # The square root has no gradient at 0, so the diagonal is masked.
    distances = torch.where(apart, (squared + TINY).sqrt(), 0)
    mean = distances.sum() / apart.sum().clamp(min=1)
    return distances / (mean + TINY)


def _angles(x: torch.Tensor) -> torch.Tensor:
    """Return the cosine of the angle at each sample (first axis) between each two others."""
    rows = x.flatten(1)
    directions = F.normalize(rows[None] - rows[:, None], dim=2, eps=1e-6)
    return directions @ directions.transpose(1, 2)
