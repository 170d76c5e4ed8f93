"""The toolkit's own metrics of labels, numbers and next tokens, one class each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, ValidationError, model_validator

from compress.common.config import Count, Settings
from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.forward import Predictor, first_output
from compress.common.lazy_modules import torch
from compress.core.metrics.metric import Metric, MetricMeter, not_finite
from compress.core.objectives.loss import Loss, loss_kind
from compress.core.objectives.task import (
    are_class_labels,
    describe_tensor,
    need_tensor,
    refuse_wrong_labels,
    same_shape,
    target_kind,
)
from compress.data.batch import IGNORED_LABEL

if TYPE_CHECKING:
    from compress.common.forward import Outputs, Tensors
    from compress.core.objectives.task import Pair, Task
    from compress.data.batch import Batch
    from compress.data.targets import Targets


class Accuracy(Metric):
    """The fraction of right labels."""

    is_fraction = in_points = reads_loss = True
    labels = "any"

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor:
        """Count the right labels of each sample, and all that are not ignored."""
        targets = need_tensor(f"metric {self.name}", targets)
        first, targets = self.loss.align(first_output(outputs), targets)
        return count_equal(self.name, *label_decisions(self.name, first, targets, self.loss))


@dataclass(frozen=True)
class Fidelity(Metric):
    """The fraction of labels equal to the reference model's.

    A sample of several outputs counts where all with as many labels as the first are equal.
    """

    shares: frozenset[int] = frozenset()
    """Numbers of the outputs that say yes above one half, not above 0."""

    is_fraction = in_points = needs_reference = True
    labels = "any"

    def targets_of(self, batch: Batch, split: str, reference: Predictor | None = None) -> Targets:
        """Return the labels of the reference model."""
        if reference is None:
            raise StageFailed("metric fidelity needs a reference model")
        outputs = [x.cpu() for x in reference(*batch.inputs)]
        return joint_decisions(less_half(outputs, self.shares), self.loss.task)

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor:
        """Count the equal labels of each sample, and all of them."""
        targets, task = need_tensor(f"metric {self.name}", targets), self.loss.task
        several = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        several = less_half(several, self.shares)
        decisions = joint_decisions(several, task)
        if len(labelled_outputs(several, task)) > 1 and decisions.shape == targets.shape:
            decisions = (decisions == targets).all(-1)  # of every output
            targets = torch.ones_like(decisions)
        return count_equal(self.name, decisions, targets)


class MeanLoss(Metric):
    """The mean of the task's loss, the user's own included."""

    higher = False
    reads_loss = True

    @property
    def reads_all_outputs(self) -> bool:
        """Whether the loss is the user's own, which gets all outputs."""
        return self.loss.is_custom

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor:
        """Add up the loss of each sample's targets, and count them."""
        return self.loss.sums_and_counts(outputs, targets)


class _MeanError(Metric):
    higher = False
    of_numbers = True
    distance: ClassVar[str]
    """The loss that is averaged, whatever the task's is."""

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor:
        targets = need_tensor(f"metric {self.name}", targets)
        return Loss(self.distance).sums_and_counts(first_output(outputs), targets)


class MeanSquaredError(_MeanError):
    """The mean of squared errors."""

    distance = "mse"


class MeanAbsoluteError(_MeanError):
    """The mean of absolute errors."""

    distance = "l1"


class R2(Metric):
    """The coefficient of determination, by sums that add up over batches and processes."""

    in_points = of_numbers = adds_states = True

    def meter(self) -> MetricMeter:
        """Return what adds up the sums."""
        return R2Meter(self)


class R2Meter(MetricMeter):
    """Adds up samples, mean and spread of the targets, and squared error: `(4, outputs)`.

    The spread is the sum of squared distances to the mean.
    """

    def _add(self, outputs: Outputs, targets: Targets, group: int | None) -> None:
        pair = loss_kind("mse").match(first_output(outputs), need_tensor("metric r2", targets))
        predicted, true = (x.double().reshape(len(x), -1) for x in pair)
        mean = true.mean(0)
        spread, error = (true - mean).square().sum(0), (predicted - true).square().sum(0)
        sums = torch.stack([torch.full_like(mean, len(true)), mean, spread, error])
        self.sums = self._added(self.sums, sums)
        self._add_group(group, sums)

    @staticmethod
    def _added(one: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
        if one is None:
            return other
        if one.shape != other.shape:
            raise StageFailed(
                f"metric r2: samples of a batch have {one.shape[1]} outputs and of another "
                f"{other.shape[1]}; pad all samples to one length, or use mse or mae"
            )
        # Chan, Golub and LeVeque (1979): sums of squares alone lose digits where the mean is large.
        (samples_a, mean_a, *sums_a), (samples_b, mean_b, *sums_b) = one, other
        samples, apart = samples_a + samples_b, mean_b - mean_a
        spread, error = (x + y for x, y in zip(sums_a, sums_b, strict=True))
        spread += apart.square() * samples_a * samples_b / samples
        return torch.stack([samples, mean_a + apart * samples_b / samples, spread, error])

    def _value(self, added: torch.Tensor) -> float:
        _, _, spread, error = added
        if not bool((spread > 0).all()):
            raise StageFailed("metric r2: the targets of an output are all equal; use mse or mae")
        return float((1 - error / spread).mean())  # over outputs


class SlidingWindow(Settings):
    """Reads samples in windows of `context` tokens, each `stride` tokens after the one before.

    Every token counts once: a window counts those that no earlier one did, and the others are what
    they are predicted from (as in transformers' guide to perplexity).
    """

    context: int = Field(ge=2)
    """Tokens that the model sees in one call."""
    stride: Count
    """Tokens by which a window begins after the one before; less than the context."""

    @model_validator(mode="after")
    def _windows_overlap(self) -> SlidingWindow:
        # The first token of a window has no predecessor there, so it must have counted before.
        if self.stride >= self.context:
            raise ValueError(
                f"stride {self.stride} is not below context {self.context}; windows have to "
                "overlap by a token, as the first of each is predicted from nothing"
            )
        return self

    def of(self, inputs: Tensors, targets: torch.Tensor) -> Iterator[tuple[Tensors, torch.Tensor]]:
        """Yield the windows of a batch: inputs, and targets with -100 for those counted before.

        Every input with the targets' length on axis 1 is cut.
        """
        length, counted = targets.shape[1], 0
        for begin in range(0, length, self.stride):
            end = min(begin + self.context, length)
            window = slice(begin, end)
            parts = (x[:, window] if x.shape[1:2] == (length,) else x for x in inputs)
            known = targets[:, window].clone()
            known[:, : counted - begin] = IGNORED_LABEL
            yield tuple(parts), known
            counted = end
            if end == length:
                return


class Perplexity(Metric):
    """The exponential of the mean cross-entropy; with `context` and `stride` over windows."""

    higher = False
    is_exponential = True
    labels = "class"

    @property
    def window(self) -> SlidingWindow | None:
        """The windows that it is measured in; None where samples are read as they are."""
        if not self.arguments:
            return None
        try:
            return SlidingWindow(**dict(self.arguments))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            problem = f"{place}: {first['msg']}" if place else first["msg"]
            raise PipelineInvalid(
                "metric perplexity: arguments take context and stride, two numbers of tokens: "
                f"{problem.replace('Value error, ', '')}"
            ) from None

    def parts(self, inputs: Tensors, targets: Targets) -> Iterator[tuple[Tensors, Targets]]:
        """Yield the batch, or its windows."""
        if window := self.window:
            yield from window.of(inputs, need_tensor("metric perplexity", targets))
        else:
            yield inputs, targets

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor:
        """Add up the cross-entropy of each sample's labels, and count them."""
        targets = need_tensor(f"metric {self.name}", targets)
        name = "nll" if self.loss.name == "nll" else "cross_entropy"
        return replace(self.loss, name=name).sums_and_counts(first_output(outputs), targets)

    def check_settings(self) -> None:
        """Raise PipelineInvalid for arguments that are no windows."""
        if self.direction is not None:
            super().check_settings()
        _ = self.window


def label_decisions(name: str, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss) -> Pair:
    """Return predicted and true labels of classes, or booleans of binary logits."""
    kind = loss.targets or target_kind(targets)
    if kind == "numbers":
        raise StageFailed(
            f"metric {name} needs labels, and targets are numbers, "
            f"{describe_tensor(targets)}; use metric: loss, mse, mae, r2"
        )
    is_multilabel = loss.task is not None and loss.task.labels == "each output"
    if kind == "probabilities" and targets.shape == outputs.shape and not is_multilabel:
        return predicted_labels(outputs), targets.argmax(1)
    if not are_class_labels(outputs, targets) and same_shape(outputs, targets):
        # Each output may be the logit of a binary target: 0, 1, soft, or ignored.
        known = (targets == 0) | (targets == 1) | (targets == IGNORED_LABEL)
        may_be_binary = targets.is_floating_point() or bool(known.all())
        if may_be_binary and loss.name_for(outputs, targets) == "binary_cross_entropy":
            loss_kind("binary_cross_entropy").match(outputs, targets)
            decisions = (targets > 0.5).where(targets != IGNORED_LABEL, IGNORED_LABEL)
            return outputs > 0, decisions.reshape(outputs.shape)
    labels = predicted_labels(outputs)
    if not targets.is_floating_point():
        refuse_wrong_labels(targets, outputs.shape[1])
    return labels, targets


def count_equal(name: str, labels: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Count labels equal to their targets, and targets not ignored: `(2, samples)`, float64."""
    if labels.shape != targets.shape:
        raise StageFailed(
            f"metric {name}: labels have shape {tuple(labels.shape)} and targets "
            f"{tuple(targets.shape)}"
        )
    counts = (labels == targets, targets != IGNORED_LABEL)
    return torch.stack([x.reshape(len(x), -1).sum(1).double() for x in counts])


def predicted_labels(outputs: torch.Tensor) -> torch.Tensor:
    """Return each sample's class of the largest output; raise StageFailed if none is defined."""
    if outputs.dim() < 2 or outputs.shape[1] < 2:
        raise StageFailed(
            f"outputs of shape {tuple(outputs.shape)} hold no classes to choose from; labels need "
            "at least two outputs a sample"
        )
    if problem := not_finite(outputs):
        raise StageFailed(problem)
    return outputs.argmax(1)


def predicted_decisions(outputs: torch.Tensor, task: Task | None = None) -> torch.Tensor:
    """Return the predicted classes, or whether each output is above 0.

    The latter where a sample has one output, and where labels do not exclude each other. A task
    says on which axis the classes are; by default on axis 1.
    """
    if task is not None:
        outputs = task.classes_first(outputs)
    if has_classes(outputs, task):
        return predicted_labels(outputs)
    if not bool(outputs.isfinite().all()):
        raise StageFailed("the model's outputs are not all finite")
    return outputs > 0


def labelled_outputs(outputs: Sequence[torch.Tensor], task: Task | None = None) -> list[int]:
    """Return which outputs have labels: the first, and others with as many, of any classes."""

    def labels(output: torch.Tensor) -> tuple[bool, tuple[int, ...]]:
        output = output if task is None else task.classes_first(output)
        if has_classes(output, task):
            return True, (*output.shape[:1], *output.shape[2:])
        return False, tuple(output.shape)

    others = range(1, len(outputs))
    scores = [i for i in others if outputs[i].is_floating_point()]
    return [0, *(i for i in scores if labels(outputs[i]) == labels(outputs[0]))]


def joint_decisions(outputs: Sequence[torch.Tensor], task: Task | None = None) -> torch.Tensor:
    """Return :func:`predicted_decisions` of all outputs with labels; several on a last axis."""
    found = [predicted_decisions(outputs[i], task) for i in labelled_outputs(outputs, task)]
    return torch.stack(found, -1) if len(found) > 1 else found[0]


def has_classes(outputs: torch.Tensor, task: Task | None) -> bool:
    """Whether a sample, or a place of it, has one class of those on axis 1."""
    exclusive = task is None or task.labels != "each output"
    return exclusive and outputs.dim() > 1 and outputs.shape[1] > 1


def less_half(outputs: Sequence[torch.Tensor], shares: Collection[int]) -> Sequence[torch.Tensor]:
    """Return outputs of which those that are shares of 0 to 1 say yes above 0, as the others."""
    return [x - 0.5 if i in shares else x for i, x in enumerate(outputs)]


def are_shares(outputs: torch.Tensor, task: Task | None) -> bool:
    """Whether outputs say yes or no, and are all from 0 to 1, as after a sigmoid."""
    outputs = outputs if task is None else task.classes_first(outputs)
    if has_classes(outputs, task) or not outputs.is_floating_point():
        return False
    return bool(((outputs >= 0) & (outputs <= 1)).all())
