"""The gate on how often a compressed model answers otherwise, by a bound that samples show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import Field

from compress.common.config import Fraction, Ratio, Unmet
from compress.common.errors import StageFailed
from compress.common.lazy_modules import torch
from compress.common.tensor_difference import measured
from compress.core.bounds import CLOPPER_PEARSON, quantile_bound, share_bound
from compress.core.gates.gate import Gate, Measured
from compress.core.gates.quality import (
    NO_ELEMENTS,
    paired_outputs,
    paired_scores,
    refuse_other_shapes,
    sample_cosines,
    too_few_samples,
)
from compress.core.metrics.builtin import joint_decisions, less_half
from compress.core.metrics.libraries import as_xywh, predicted_boxes
from compress.core.metrics.metric import Metric
from compress.core.verdict import Bound

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.objectives.task import Task
    from compress.data.batch import Batch
    from compress.data.targets import Targets

    Outputs: TypeAlias = dict[str, torch.Tensor]

QUANTILES = (50, 90, 99, 99.9)
"""Percent of inputs whose error is bounded as well, where errors are numbers."""
MOST_CLASSES = 20
"""Classes with a bound each; of more, each would rest on few samples."""


class MaxDisagreement(Gate):
    """At most this percent of all inputs are answered otherwise than by the uncompressed model.

    Judged is the upper confidence bound (Clopper and Pearson) for inputs like the samples of `val`,
    so that it passes only where there are enough of them to show it. A sample is answered otherwise
    where its error is above `error`. Of labels, that is the share of the sample's labels that
    differ; of vectors (`task: embedding`), 1 - cosine; of boxes (`task: detection`), 1 - overlap
    with the nearest box of the same label, for the worst box of either model; of other numbers, the
    largest absolute difference. Of several outputs the worst decides. Answers of a model whose task
    is not known are labels, or numbers where `error` is given.
    """

    gate: Literal["max_disagreement"] = "max_disagreement"
    percent: Annotated[float, Field(gt=0, lt=100)]
    """Largest percent of inputs with other answers."""
    confidence: Ratio = 0.95
    """Probability, over the choice of samples, that the bound holds."""
    error: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """Largest error of an answer that counts as the same. By default 0 for labels; needed for
    vectors, boxes and numbers. `percent: 1` and `error: 0.05` pass where the bound of the 99th
    percentile of errors is 0.05 at most."""
    score: Fraction = 0.5
    """Least score of boxes that count."""

    limit_field = "percent"
    rule_template = "inputs answered otherwise <= {percent:g} %"
    judges_quality = depends_on_batch = needs_data = of_uncompressed = True
    # To earlier versions all shares after a sigmoid were a yes.
    measured_as: ClassVar = {"shares": "one half"}

    @property
    def rule(self) -> str:
        """The rule, with what counts as another answer."""
        beyond = f" by more than {self.error:g}" if self.error else ""
        sure = f"with {100 * self.confidence:g} % confidence"
        return f"{sure}, inputs answered otherwise{beyond} <= {self.percent:g} %"

    def unmet_by(self, context: Context) -> Iterator[Unmet]:
        """Yield that `val` is too small to show the limit, even without another answer."""
        yield from super().unmet_by(context)
        yield from too_few_samples(context, self.percent / 100, self.confidence, "percent")

    def unsuitable_task(self, task: Task) -> str:
        """Return which setting the model's kind of answers needs, or has no use for."""
        if not task.has_labels and self.error is None:
            return (
                f"a model for {task.name} gives {task.answer}; add error: the largest "
                f"{_errors_of(task).name} of an answer that counts as the same"
            )
        if task.name != "detection" and not self.has_default("score"):
            return f"score is for boxes, and a model for {task.name} gives {task.answer}"
        return ""

    def reads_labels(self, context: Context) -> bool:
        """Whether answers are labels, of which the error is the share that differs."""
        return _errors_of(context.task, self.error) is LABELS

    def errors(self, one: Outputs, other: Outputs, context: Context) -> torch.Tensor:
        """Return each sample's error, `(samples,)`, of both models' outputs by name."""
        found = _errors_of(context.task, self.error).measure(one, other, context, self.score)
        return found.double().nan_to_num(math.inf)

    def measure(self, before: Artifact, after: Artifact, context: Context) -> Measured:
        """Compare both models' answers to each sample of `val`; return the bound, in percent."""
        # All of them where a run judges quickly, too: 16 show nothing.
        judging = context.without_choosing_samples(after)
        is_half, context = judging is not context, replace(judging, is_quick=False)
        names = [spec.name for spec in before.signature.outputs]
        errors, classes, count = list[torch.Tensor](), list[torch.Tensor](), 0
        reads_labels = self.reads_labels(context)
        read = paired_scores if reads_labels else paired_outputs
        for pair in read(before, after, context):
            one, other = (dict(zip(names, outputs, strict=True)) for outputs in pair)
            errors.append(self.errors(one, other, context))
            if reads_labels and (labels := labels_of(one, context)).shape[1] == 1:
                classes.append(labels[:, 0].long())
                count = 2 if labels.dtype == torch.bool else pair[0][0].shape[1]
        found = torch.cat(errors or [torch.empty(0)])
        if not (samples := len(found)):
            raise StageFailed("the outputs have no samples, so that there is nothing to compare")
        differs = found > (self.error or 0)
        of_class: dict[str, float] = {}
        if 0 < count <= MOST_CLASSES:
            own, shared = torch.cat(classes), 1 - (1 - self.confidence) / count
            groups = {str(label): differs[own == label] for label in range(count)}
            of_class = {
                label: round(100 * share_bound(int(group.sum()), len(group), shared), 4)
                for label, group in groups.items()
            }
        ends = {
            f"{q:g}": quantile_bound(found.numpy(), q / 100, self.confidence)
            for q in (() if reads_labels else QUANTILES)
        }
        changed = int(differs.sum())
        bound = Bound(
            value=100 * share_bound(changed, samples, self.confidence),
            measured=100 * changed / samples,
            samples=samples,
            changed=changed,
            is_half=is_half,
            confidence=self.confidence,
            method=CLOPPER_PEARSON,
            classes=of_class,
            quantiles={q: end for q, end in ends.items() if end is not None and end < math.inf},
        )
        return Measured(bound.value, bound=bound)


@dataclass(frozen=True)
class AnswerAgreement(Metric):
    """The fraction of samples that are not answered otherwise than by the reference model."""

    gate: Any = None
    """The gate `max_disagreement`, which says what counts as another answer."""
    context: Any = field(default=None, compare=False)
    """Where the gate computes errors: its task says of what kind."""
    shares: frozenset[int] = frozenset()
    """Numbers of the outputs that say yes above one half, not above 0."""

    is_fraction = in_points = needs_reference = True

    def targets_of(self, batch: Batch, split: str, reference: Any = None) -> Targets:
        """Return the outputs of the reference model, by name."""
        return self._by_name([x.cpu() for x in reference(*batch.inputs)])

    def sums_and_counts(self, outputs: Any, targets: Any) -> torch.Tensor:
        """Tell of each sample whether its answer is the same, and count it."""
        errors = self.gate.errors(targets, self._by_name(outputs), self.context)
        return torch.stack([(errors <= (self.gate.error or 0)).double(), torch.ones(len(errors))])

    def _by_name(self, outputs: Any) -> dict[str, torch.Tensor]:
        return dict(zip(self.outputs, less_half(outputs, self.shares), strict=True))


class _Errors(NamedTuple):
    name: str
    """What the error of a sample is, for messages."""
    measure: Callable[[Outputs, Outputs, Context, float], torch.Tensor]
    """Returns each sample's error, `(samples,)`, of both models' outputs by name; the number is the
    least score of boxes that count."""


def labels_of(outputs: Outputs, context: Context) -> torch.Tensor:
    """Return the labels of each sample by a model's outputs, `(samples, labels)`."""
    labels = joint_decisions([*outputs.values()], context.task)
    return labels.reshape(len(labels), -1)


def _label_errors(one: Outputs, other: Outputs, context: Context, score: float) -> torch.Tensor:
    labels, others = labels_of(one, context), labels_of(other, context)
    refuse_other_shapes(labels, others, "labels")
    return (labels != others).double().mean(1)


def _differences(one: Outputs, other: Outputs, context: Context, score: float) -> torch.Tensor:
    found = []
    for expected, got in zip(one.values(), other.values(), strict=True):
        refuse_other_shapes(expected, got)
        a, b = measured(expected, got)
        found.append((a - b).abs().reshape(len(a), -1).amax(1))
    return torch.stack(found).nan_to_num(math.inf).amax(0)


def _angles(one: Outputs, other: Outputs, context: Context, score: float) -> torch.Tensor:
    cosines = sample_cosines(tuple(one.values()), tuple(other.values()))
    if not cosines:
        raise StageFailed(NO_ELEMENTS)
    return (1 - torch.stack([*cosines.values()])).nan_to_num(math.inf).amax(0)


def _box_errors(one: Outputs, other: Outputs, context: Context, score: float) -> torch.Tensor:
    settings = dict(context.metric.arguments) if context.metric.name == "map" else {}
    form = settings.get("box_format") or ("cxcywh" if "pred_boxes" in one else "xyxy")
    sides = []
    for outputs in (one, other):
        boxes, scores, labels = predicted_boxes(outputs, settings.get("scores", "softmax"))
        chosen = (scores >= score) & (labels >= 0)
        own = zip(boxes.double(), labels, chosen, strict=True)
        sides.append([(as_xywh(box[is_one], form), label[is_one]) for box, label, is_one in own])
    errors = []
    for (found, labels), (others, theirs) in zip(*sides, strict=True):
        overlaps = _overlaps(found, others).masked_fill(labels[:, None] != theirs[None], 0.0)
        nearest = [overlaps.amax(axis) for axis in (0, 1) if overlaps.numel()]
        # Where one model alone finds boxes, none of them has another.
        agree = float(len(found) == len(others))
        errors.append(1 - (torch.cat(nearest).min() if nearest else torch.tensor(agree)))
    return torch.stack(errors)


def _overlaps(one_N4: torch.Tensor, other_M4: torch.Tensor) -> torch.Tensor:
    """Return intersection over union of each pair of boxes, of left, top, width and height."""
    one, other = one_N4[:, None], other_M4[None]
    low = torch.maximum(one[..., :2], other[..., :2])
    high = torch.minimum(one[..., :2] + one[..., 2:], other[..., :2] + other[..., 2:])
    both = (high - low).clamp(min=0).prod(-1)
    union = one[..., 2:].prod(-1) + other[..., 2:].prod(-1) - both
    return torch.where(union > 0, both / union, 0.0)


LABELS = _Errors("share of a sample's labels that differ", _label_errors)
NUMBERS = _Errors("difference", _differences)
OF_TASKS = {
    "embedding": _Errors("1 - cosine", _angles),
    "detection": _Errors("1 - overlap", _box_errors),
}


def _errors_of(task: Task | None, error: float | None = None) -> _Errors:
    if task is None:
        return LABELS if error is None else NUMBERS
    if task.has_labels:
        return LABELS
    return OF_TASKS.get(task.name, NUMBERS)
