"""Metrics of labels: how many of a model's answers are right, or another model's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import StageFailed
from compress.common.forward import first_output
from compress.core.metrics.metric import Metric, not_finite
from compress.core.objectives.loss import loss_kind
from compress.core.objectives.task import (
    are_class_labels,
    describe_tensor,
    need_tensor,
    refuse_wrong_labels,
    same_shape,
    target_kind,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from compress.common.forward import Outputs, Predictor
    from compress.core.objectives.loss import Loss
    from compress.core.objectives.task import Task
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


class Fidelity(Metric):
    """The fraction of labels equal to the reference model's.

    A sample of several outputs counts where they are equal in all that have as many labels as the
    first.
    """

    is_fraction = in_points = needs_reference = True
    labels = "any"

    def targets_of(self, batch: Batch, split: str, reference: Predictor | None = None) -> Targets:
        """Return the labels of the reference model."""
        if reference is None:
            raise StageFailed("metric fidelity needs a reference model")
        return joint_decisions([x.cpu() for x in reference(*batch.inputs)], self.loss.task)

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor:
        """Count the equal labels of each sample, and all of them."""
        import torch

        targets, task = need_tensor(f"metric {self.name}", targets), self.loss.task
        several = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        decisions = joint_decisions(several, task)
        if len(labelled_outputs(several, task)) > 1 and decisions.shape == targets.shape:
            decisions = (decisions == targets).all(-1)  # of every output
            targets = torch.ones_like(decisions)
        return count_equal(self.name, decisions, targets)


def label_decisions(
    name: str, outputs: torch.Tensor, targets: torch.Tensor, loss: Loss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predicted and true labels of classes, or booleans of binary logits."""
    from compress.data.batch import IGNORED_LABEL

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
    """Return how many labels equal their targets, and how many targets are not ignored.

    By sample, `(2, samples)`, in float64.
    """
    import torch

    from compress.data.batch import IGNORED_LABEL

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
    if _has_classes(outputs, task):
        return predicted_labels(outputs)
    if not bool(outputs.isfinite().all()):
        raise StageFailed("the model's outputs are not all finite")
    return outputs > 0


def labelled_outputs(outputs: Sequence[torch.Tensor], task: Task | None = None) -> list[int]:
    """Return which outputs have labels: the first, and others with as many, of any classes."""

    def labels(output: torch.Tensor) -> tuple[bool, tuple[int, ...]]:
        output = output if task is None else task.classes_first(output)
        if _has_classes(output, task):
            return True, (*output.shape[:1], *output.shape[2:])
        return False, tuple(output.shape)

    others = range(1, len(outputs))
    scores = [i for i in others if outputs[i].is_floating_point()]
    return [0, *(i for i in scores if labels(outputs[i]) == labels(outputs[0]))]


def joint_decisions(outputs: Sequence[torch.Tensor], task: Task | None = None) -> torch.Tensor:
    """Return :func:`predicted_decisions` of all outputs with labels; several on a last axis."""
    import torch

    found = [predicted_decisions(outputs[i], task) for i in labelled_outputs(outputs, task)]
    return torch.stack(found, -1) if len(found) > 1 else found[0]


def _has_classes(outputs: torch.Tensor, task: Task | None) -> bool:
    """Whether a sample, or a place of it, has one class of those on axis 1."""
    exclusive = task is None or task.labels != "each output"
    return exclusive and outputs.dim() > 1 and outputs.shape[1] > 1
