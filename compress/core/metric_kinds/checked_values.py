"""Checks of outputs and values that several metrics share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from compress.core.objectives.task import Task


def not_finite(outputs: torch.Tensor) -> str:
    """Return why no metric can be computed from outputs; empty where one can."""
    # A class whose score is -inf is masked: the largest output and the softmax are defined, as long
    # as another class is left.
    is_finite = outputs.isfinite()
    if bool(is_finite.all()):
        return ""
    if bool(outputs.isnan().any()):
        return "the model's outputs are not all finite: some are NaN"
    if bool(outputs.isposinf().any()) or outputs.dim() < 2 or outputs.shape[1] < 2:
        return "the model's outputs are not all finite: some are infinite"
    if not bool(is_finite.any(1).all()):
        return "all classes of a sample are masked (-inf), so that it has no label"
    return ""


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


def one_number(name: str, value: Any) -> float:
    """Return a metric's value as a number; raise StageFailed where it is not one."""
    import torch

    is_one = not isinstance(value, torch.Tensor) or value.numel() == 1
    try:
        if is_one:
            return float(value)
    except (TypeError, ValueError):
        pass
    is_tensor = isinstance(value, torch.Tensor)
    found = f"a tensor of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
    raise StageFailed(f"metric {name!r} returned {found}, expected one number")


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
