"""Kinds of targets (labels, probabilities, numbers), and whether a model's outputs fit them.

Shapes: axis 0 of outputs and targets is the batch, and axis 1 of the outputs has the classes, as in
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from compress.data.splits import Splits
    from compress.data.targets import Targets

SAMPLES = 512
"""Samples whose targets decide what kind a dataset's are, at most."""
SUM_TOLERANCE = 1e-2
"""How far probabilities of a sample may sum to other than 1: half precision has three digits."""

TargetKind: TypeAlias = Literal["labels", "binary", "probabilities", "numbers", "nested"]
"""Whole numbers; floats that are all 0 or 1; floats that sum to 1 over axis 1; other floats; lists
and mappings."""


class LabelOutOfRange(StageFailed):
    """A label that the model has no class for."""

    def __init__(self, message: str, row: int = 0) -> None:
        super().__init__(message)
        self.row = row
        """Place of its sample in the batch."""


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
    import torch

    batches = []
    for batch in data.batches(targets_split(data), limit=SAMPLES):
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
    import torch

    if isinstance(outputs, torch.Tensor):
        return describe_tensor(outputs)
    return ", ".join(f"{name} {describe_tensor(x)}" for name, x in outputs.items())


def describe_targets(targets: Targets) -> str:
    """Describe a batch's targets: ``a list of [{boxes: float32 [2, 4]}, …]``."""
    import torch

    if isinstance(targets, torch.Tensor):
        return describe_tensor(targets)
    if isinstance(targets, dict):
        return f"{{{', '.join(f'{name}: {describe_targets(y)}' for name, y in targets.items())}}}"
    first = next((y for y in targets if y is not None), None)
    return f"a list of [{_describe_entry(first)}, …]"


def _describe_entry(entry: Targets | None) -> str:
    """Describe one sample's part of a list of targets, whose tensors have no axis of samples."""
    if isinstance(entry, dict):
        return f"{{{', '.join(f'{name}: {_describe_entry(y)}' for name, y in entry.items())}}}"
    if isinstance(entry, list):
        return f"[{', '.join(map(_describe_entry, entry))}]"
    dtype = "None" if entry is None else str(entry.dtype).removeprefix("torch.")
    return dtype if entry is None else f"{dtype} {list(entry.shape)}"


def need_tensor(what: str, targets: Targets) -> torch.Tensor:
    """Return targets that are one tensor; raise StageFailed for lists and mappings of them."""
    import torch

    if isinstance(targets, torch.Tensor):
        return targets
    kind = what.partition(" ")[0]
    raise StageFailed(
        f"{what} takes targets that are one tensor, found {describe_targets(targets)}; write "
        f"{kind}: module:callable, a function of outputs and targets"
    )


def has_target(targets: Targets) -> torch.Tensor:
    """Return a boolean mask of the samples that have a target: a label, or numbers."""
    import torch

    from compress.data.batch import IGNORED_LABEL

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
    sums = rows.double().sum(1)
    return bool((rows >= 0).all()) and bool(((sums - 1).abs() <= SUM_TOLERANCE).all())


def shape_of(tensor: torch.Tensor) -> str:
    """Return a tensor's shape as :func:`describe_tensor` has it."""
    return describe_tensor(tensor).partition(" ")[2]


def refuse_wrong_labels(labels: torch.Tensor, classes: int) -> None:
    """Raise LabelOutOfRange for a label that a model of so many classes does not have."""
    from compress.data.batch import IGNORED_LABEL
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
