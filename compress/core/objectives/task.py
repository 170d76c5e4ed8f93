"""Tasks by name: which loss, metric, gates and comparison of answers fit what a model is for.

Shapes: axis 0 of outputs and targets is the batch. Classes lie on axis 1 of the outputs, as in
torch, or on the last one for tokens, as in transformers: `(batch, length, classes)`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from compress.common.errors import PipelineInvalid, StageFailed
from compress.core.objectives.targets import (
    TargetKind,
    are_class_labels,
    same_shape,
    target_kind,
)

if TYPE_CHECKING:
    import torch

    from compress.data.targets import Targets

TaskName = Literal[
    "classification",
    "multilabel",
    "regression",
    "segmentation",
    "detection",
    "embedding",
    "causal-lm",
    "token-classification",
]
NO_METRIC = "none"
"""Name of the metric of a pipeline that measures none."""


@dataclass(frozen=True)
class Task:
    """What a model is for, and the defaults that follow from it."""

    name: TaskName
    losses: tuple[str, ...]
    """Built-in losses that fit. Without `loss:` the one that the targets suggest, or the first;
    empty where every loss is as good, and a training has to name one."""
    metric: str
    """Name of the default metric; `none` where there is none."""
    gates: tuple[dict[str, Any], ...] = field(compare=False)
    """Settings of the gates on quality that a drafted pipeline gets, without `against`; the first
    decides what compression may cost."""
    answer: str = field(compare=False)
    """What the first output of a deployed model holds, for people."""
    labels: Literal["class", "each output"] | None = None
    """What two models' answers are compared by: the class of the largest output, whether each
    output is above 0, or None where outputs are no scores."""
    classes_last: bool = False
    """Whether the classes lie on the last axis of the outputs, `(batch, length, classes)`."""
    next_token: bool = False
    """Whether the scores at a position are those of the next position's label."""

    @property
    def has_labels(self) -> bool:
        """Whether outputs are scores, so that labels of two models can be compared."""
        return self.labels is not None

    def classes_first(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return outputs with the classes on axis 1, where losses and metrics expect them."""
        return outputs.movedim(-1, 1) if self.classes_last and outputs.dim() > 2 else outputs

    def align(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs with classes on axis 1, each beside its own target.

        Raises:
            StageFailed: the task has a label for each position, and the shapes do not.
        """
        if not self.classes_last:
            return outputs, targets
        if outputs.dim() < 3 or outputs.shape[:-1] != targets.shape:
            raise StageFailed(
                f"task: {self.name} takes outputs (batch, length, classes) and labels (batch, "
                f"length), found {tuple(outputs.shape)} and {tuple(targets.shape)}"
            )
        outputs = self.classes_first(outputs)
        return (outputs[:, :, :-1], targets[:, 1:]) if self.next_token else (outputs, targets)


_POINT = {"gate": "max_drop", "points": 1.0}
_EQUAL_LABELS = {"gate": "label_agreement", "minimum": 0.99}
_FIVE_PERCENT = {"gate": "max_relative_drop", "percent": 5.0}

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "classification",
            # The second where a model has one output, for yes or no.
            losses=("cross_entropy", "binary_cross_entropy", "nll"),
            metric="accuracy",
            gates=(_POINT, _EQUAL_LABELS),
            answer="a score for each class",
            labels="class",
        ),
        Task(
            "multilabel",
            losses=("binary_cross_entropy",),
            metric="accuracy",
            gates=(_POINT, _EQUAL_LABELS),
            answer="a score for each label, above 0 where it applies",
            labels="each output",
        ),
        Task(
            "regression",
            losses=("mse", "l1", "smooth_l1"),
            metric="mse",
            gates=(_FIVE_PERCENT,),
            answer="numbers",
        ),
        Task(
            "segmentation",
            losses=("cross_entropy", "binary_cross_entropy", "nll"),
            metric="miou",
            gates=(_POINT,),
            answer="a score for each class at each pixel",
            labels="class",
        ),
        Task(
            "detection",
            losses=(),
            metric="map",
            gates=(_POINT,),
            answer="boxes with scores",
        ),
        Task(
            "embedding",
            losses=(),
            metric=NO_METRIC,
            gates=({"gate": "min_cosine", "minimum": 0.99},),
            answer="a vector",
        ),
        Task(
            "causal-lm",
            losses=("cross_entropy",),
            metric="perplexity",
            gates=(_FIVE_PERCENT,),
            answer="at each position a score for each token that may follow",
            labels="class",
            classes_last=True,
            next_token=True,
        ),
        Task(
            "token-classification",
            losses=("cross_entropy", "nll"),
            metric="accuracy",
            gates=(_POINT, _EQUAL_LABELS),
            answer="a score for each class at each token",
            labels="class",
            classes_last=True,
        ),
    )
}
"""Every task by its name."""


def task_named(name: str | None) -> Task | None:
    """Return the task of a name, None for None; raise PipelineInvalid for an unknown name."""
    if name is not None and name not in TASKS:
        raise PipelineInvalid(f"task {name!r} is unknown; expected {', '.join(TASKS)}")
    return None if name is None else TASKS[name]


LOSS_OF_TARGETS: dict[TargetKind | None, str] = {
    "labels": "cross_entropy",
    "binary": "binary_cross_entropy",
    "probabilities": "cross_entropy",
    "numbers": "mse",
    # Of one sample's lists, where others are tensors: the shapes decide whether it fits.
    "nested": "mse",
}
"""Kind of targets → the loss that fits them."""


def infer_loss(
    kind: TargetKind | None, task: Task | None, *, has_classes: bool = True
) -> str | None:
    """Return the name of the loss that targets of a kind show: one of the task's, if it has any.

    Labels are `cross_entropy` where the outputs have classes, and else yes or no for each output.
    """
    name = LOSS_OF_TARGETS.get(kind)
    if kind == "labels" and not has_classes:
        name = "binary_cross_entropy"
    return task.losses[0] if task and task.losses and name not in task.losses else name


def infer_task(targets: Targets, outputs: torch.Tensor | None = None) -> Task | None:
    """Return the task that targets show, or that they and a model's first output do.

    None where several are possible: without outputs, labels with further axes may be those of
    pixels, of tokens, or several for each sample.
    """
    kind = target_kind(targets)
    if isinstance(targets, list | dict):
        return None
    name: TaskName | None
    if outputs is None:
        axes = sum(size != 1 for size in targets.shape[1:])
        if kind == "numbers":
            name = "regression"
        elif kind == "probabilities" or not axes:
            name = "classification"
        else:
            name = "multilabel" if kind == "binary" and axes == 1 else None
    elif kind == "labels" and are_class_labels(outputs, targets):
        name = "segmentation" if outputs.dim() > 3 else "classification"
    elif kind == "labels" and outputs.dim() == 3 and outputs.shape[:-1] == targets.shape:
        name = "token-classification"
    elif not same_shape(outputs, targets):
        name = None
    elif kind in ("labels", "binary"):
        name = "multilabel" if outputs[:1].numel() > 1 else "classification"
    else:
        name = "classification" if kind == "probabilities" else "regression"
    return TASKS[name] if name else None
