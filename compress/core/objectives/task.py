"""What a model is for and what its targets are: the defaults that follow, and which outputs fit.

Shapes: axis 0 of outputs and targets is the batch. Classes lie on axis 1 of the outputs, as in
torch, or on the last one for tokens, as in transformers: `(batch, length, classes)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from compress.common.errors import CompressError, PipelineInvalid, StageFailed, first_line
from compress.common.lazy_modules import torch
from compress.data.batch import IGNORED_LABEL

if TYPE_CHECKING:
    from compress.data.splits import Splits
    from compress.data.targets import Targets

    Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
    """Outputs, or their labels, and targets."""

TargetKind: TypeAlias = Literal["labels", "binary", "probabilities", "numbers", "nested"]
"""Whole numbers; floats that are all 0 or 1; floats that sum to 1 over axis 1; other floats; lists
and mappings."""


class LabelOutOfRange(StageFailed):
    """A label that the model has no class for."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row  # place of its sample in the batch


def target_kind(targets: Targets) -> TargetKind:
    """Infer what targets are: from their dtype, and of floats from values other than NaN."""
    if isinstance(targets, list | dict):
        return "nested"
    if not targets.is_floating_point():
        return "labels"
    targets = targets[has_target(targets)]
    if are_probabilities(targets):
        return "probabilities"
    return "binary" if bool(((targets == 0) | (targets == 1)).all()) else "numbers"


def targets_split(data: Splits) -> str:
    """Return the split whose targets decide the kind of the task."""
    return next((n for n in ("train", "val") if n in data.datasets), next(iter(data.datasets)))


def sampled_targets(data: Splits) -> Targets | None:
    """Return targets of some training samples, drawn at random; None where none has one.

    Of targets that are lists or mappings, it returns those of a batch.
    """
    batches = []
    for batch in data.batches(targets_split(data), limit=512):
        if isinstance(batch.target, list | dict):
            return batch.target
        if batch.target is not None:
            batches.append(batch.target)
    # Padded batches differ in length, and the kind of targets does not depend on their shapes.
    equal_shapes = [target for target in batches if target.shape[1:] == batches[0].shape[1:]]
    labelled = [target[has_target(target)] for target in equal_shapes]
    return torch.cat(labelled) if any(map(len, labelled)) else None


def describe_tensor(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype and shape, its first axis as ``n``: ``float32 [n, 10]``."""
    shape = ", ".join(["n", *map(str, tensor.shape[1:])] if tensor.dim() else [])
    return f"{str(tensor.dtype).removeprefix('torch.')} [{shape}]"


def describe_outputs(outputs: torch.Tensor | Mapping[str, torch.Tensor]) -> str:
    """Describe a model's outputs, several by name: ``boxes float32 [n, 5, 4]``."""
    if isinstance(outputs, Mapping):
        return ", ".join(f"{name} {describe_tensor(x)}" for name, x in outputs.items())
    return describe_tensor(outputs)


def describe_targets(targets: Targets) -> str:
    """Describe a batch's targets: ``a list of [{boxes: float32 [2, 4]}, …]``."""
    if isinstance(targets, dict):
        return f"{{{', '.join(f'{name}: {describe_targets(y)}' for name, y in targets.items())}}}"
    if isinstance(targets, list):
        first = next((y for y in targets if y is not None), None)
        return f"a list of [{_describe_entry(first)}, …]"
    return describe_tensor(targets)


def describe_pair(outputs: torch.Tensor | Mapping[str, torch.Tensor], targets: Targets) -> str:
    """Describe what a loss or metric is called with: ``outputs float32 [n, 4] and targets …``."""
    return f"outputs {describe_outputs(outputs)} and targets {describe_targets(targets)}"


@contextmanager
def user_errors(what: str, outputs: Any = None, targets: Any = None) -> Iterator[None]:
    """Turn what user code raises in a block into StageFailed, with what it was called with."""
    try:
        yield
    except CompressError:
        raise
    except Exception as error:
        forms = "" if targets is None else f" for targets {describe_targets(targets)}"
        forms = forms if outputs is None else f" for {describe_pair(outputs, targets)}"
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise StageFailed(f"{what} fails{forms}: {problem}") from error


def _describe_entry(entry: Targets | None) -> str:
    # One sample's part of a list of targets, whose tensors have no axis of samples.
    if isinstance(entry, dict):
        return f"{{{', '.join(f'{name}: {_describe_entry(y)}' for name, y in entry.items())}}}"
    if isinstance(entry, list):
        return f"[{', '.join(map(_describe_entry, entry))}]"
    dtype = "None" if entry is None else str(entry.dtype).removeprefix("torch.")
    return dtype if entry is None else f"{dtype} {list(entry.shape)}"


def need_tensor(what: str, targets: Targets) -> torch.Tensor:
    """Return targets that are one tensor; raise StageFailed for lists and mappings of them."""
    if not isinstance(targets, list | dict):
        return targets
    kind = what.partition(" ")[0]
    raise StageFailed(
        f"{what} takes targets that are one tensor, found {describe_targets(targets)}; write "
        f"{kind}: module:callable, a function of outputs and targets"
    )


def has_target(targets: Targets) -> torch.Tensor:
    """Return a boolean mask of the samples that have a target: a label, or numbers."""
    if isinstance(targets, dict):
        return torch.stack([has_target(entry) for entry in targets.values()]).any(0)
    if isinstance(targets, list):
        return torch.tensor([entry is not None for entry in targets])
    is_missing = targets.isnan() if targets.is_floating_point() else targets == IGNORED_LABEL
    return ~is_missing.reshape(len(targets), -1).all(1)


def are_class_labels(outputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether targets have the outputs' shape without axis 1, which has two classes or more."""
    shape = outputs.shape
    return len(shape) > 1 and shape[1] > 1 and targets.shape == shape[:1] + shape[2:]


def same_shape(outputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether shapes are equal, leaving out axes of size 1 after the first."""
    shapes = [x.shape[:1] + tuple(n for n in x.shape[1:] if n != 1) for x in (outputs, targets)]
    return bool(outputs.dim()) and shapes[0] == shapes[1]


def are_probabilities(rows: torch.Tensor) -> bool:
    """Whether axis 1 holds probabilities of at least two classes."""
    if rows.dim() < 2 or rows.shape[1] < 2:
        return False
    # Half precision has three digits, so that a sample's may sum to other than 1.
    return bool((rows >= 0).all() and ((rows.double().sum(1) - 1).abs() <= 1e-2).all())


def shape_of(tensor: torch.Tensor) -> str:
    """Return a tensor's shape as :func:`describe_tensor` has it."""
    return describe_tensor(tensor).partition(" ")[2]


def refuse_wrong_labels(labels: torch.Tensor, classes: int) -> None:
    """Raise LabelOutOfRange for a label that a model of so many classes does not have."""
    from compress.data.fingerprint import out_of_range

    is_wrong = ((labels < 0) | (labels >= classes)) & (labels != IGNORED_LABEL)
    if bool(is_wrong.any()):
        place = int(is_wrong.reshape(len(labels), -1).any(1).nonzero()[0])
        raise LabelOutOfRange(out_of_range(int(labels[is_wrong][0]), classes), place)


def suggest_targets(outputs: torch.Tensor, targets: torch.Tensor) -> str:
    """Return a hint for an error: which loss, or which targets, fit these outputs."""
    kind, is_same = target_kind(targets), same_shape(outputs, targets)
    if kind == "labels" and are_class_labels(outputs, targets):
        return "for labels use cross_entropy"
    if kind == "numbers" and is_same:
        return "for numbers use mse, l1 or smooth_l1"
    if kind in ("labels", "binary") and is_same:
        return "for one yes or no per output use binary_cross_entropy"
    if outputs.dim() == 3 and kind == "labels" and outputs.shape[:-1] == targets.shape:
        return (
            "for labels of tokens write task: causal-lm (a label at each position is the token "
            "there, and the scores before it are for it) or task: token-classification"
        )
    if outputs.dim() > 1 and outputs.shape[1] > 1:
        return (
            f"for classes return labels as whole numbers of shape {shape_of(outputs[:, 0])}, "
            f"otherwise targets of shape {shape_of(outputs)}"
        )
    return f"return targets of shape {shape_of(outputs)}"


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
NO_METRIC = "none"  # name of the metric of a pipeline that measures none


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
    """Settings of a drafted pipeline's gates on quality; the first decides what may be lost."""
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

    def align(self, outputs: torch.Tensor, targets: torch.Tensor) -> Pair:
        """Return outputs with classes on axis 1, each beside its target, or raise StageFailed."""
        if not self.classes_last:
            return outputs, targets
        if outputs.dim() < 3 or outputs.shape[:-1] != targets.shape:
            raise StageFailed(
                f"task: {self.name} takes outputs (batch, length, classes) and labels (batch, "
                f"length), found {tuple(outputs.shape)} and {tuple(targets.shape)}"
            )
        outputs = self.classes_first(outputs)
        return (outputs[:, :, :-1], targets[:, 1:]) if self.next_token else (outputs, targets)


_COSINE = {"gate": "min_cosine", "minimum": 0.99}
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
        Task("detection", losses=(), metric="map", gates=(_POINT,), answer="boxes with scores"),
        Task("embedding", losses=(), metric=NO_METRIC, gates=(_COSINE,), answer="a vector"),
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
    if name is None:
        return None
    if name not in TASKS:
        raise PipelineInvalid(f"task {name!r} is unknown; expected {', '.join(TASKS)}")
    return TASKS[name]


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
