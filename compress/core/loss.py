"""The loss of a task, by name: what training minimizes and what the metric `loss` measures.

Shapes: axis 0 of outputs and targets is the batch, and axis 1 of the outputs has the classes, as in
torch. Every loss is a mean over samples, so that parts of a batch add up to the whole.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path  # noqa: TC003 - a dataclass field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeAlias

from pydantic import AfterValidator, WithJsonSchema

from compress.core.errors import CompressError, PipelineInvalid, StageFailed, first_line

if TYPE_CHECKING:
    import torch
    from pydantic import JsonValue

    from compress.core.data import Splits

OF_CLASSES = ("cross_entropy", "binary_cross_entropy", "nll")
"""Losses of models that choose among classes."""
OF_NUMBERS = ("mse", "l1", "smooth_l1")
"""Losses of models that predict numbers."""
BUILT_IN = (*OF_CLASSES, *OF_NUMBERS)
WEIGHTED = ("cross_entropy", "nll")
"""Losses that take class weights."""
SMOOTHED = ("cross_entropy",)
"""Losses that take label smoothing."""
DEFAULT_SMOOTHING = 0.1
REFERENCE = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")

SAMPLES = 512
"""Samples whose targets decide what kind they are."""
SUM_TOLERANCE = 1e-2
"""How far probabilities of a sample may sum to other than 1: half precision has three digits."""
POSITIVE_LOG = 1e-3
"""Rounding may lift the logarithm of a probability of 1 above 0."""

Targets: TypeAlias = Literal["labels", "binary", "probabilities", "numbers"]
"""Whole numbers; floats that are all 0 or 1; floats that sum to 1 over axis 1; other floats."""


class Mean(Protocol):
    """A loss function: a scalar, the mean over samples."""

    def __call__(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        class_weights: torch.Tensor | None = None,
        label_smoothing: float | None = None,
        over_all: bool = False,
    ) -> torch.Tensor:
        """Return the mean.

        Args:
            outputs: the model's first output.
            targets: what it should be.
            class_weights: one for each class; the sum is then divided by the number of samples,
                not by that of the weights, so that it does not depend on how a step is cut up.
            label_smoothing: share of a target that is spread over all classes; by default 0.1 for
                `cross_entropy`.
            over_all: divide by the number of all targets, instead of those that are not left out.
        """
        ...


def _known(name: str) -> str:
    if name in BUILT_IN or REFERENCE.match(name):
        return name
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = ", ".join(BUILT_IN)
    raise ValueError(f"unknown loss {name!r}; {hint}expected {known} or module:callable")


LossName = Annotated[
    str,
    AfterValidator(_known),
    WithJsonSchema(
        {"anyOf": [{"enum": list(BUILT_IN)}, {"type": "string", "pattern": REFERENCE.pattern}]}
    ),
]
"""Name of a loss, or ``module:callable`` (outputs, targets → scalar)."""


@dataclass(frozen=True)
class Loss:
    """A loss by name, resolved where it is needed.

    Names are those of torch: ``cross_entropy`` and ``binary_cross_entropy`` of logits, ``nll`` of
    log-probabilities, ``mse``, ``l1``, ``smooth_l1``. ``module:callable`` takes the first output
    and the targets of a batch, and returns the mean over its samples. Without a name the loss
    follows from the targets: see :meth:`name_for`.
    """

    name: str | None = None
    targets: Targets | None = None
    """What the targets of the data are; found out by :meth:`settled` where it is needed."""
    folder: Path | None = None
    """Where the module of ``module:callable`` lies."""

    def __post_init__(self) -> None:
        if self.name is not None:
            try:
                _known(self.name)
            except ValueError as error:
                raise PipelineInvalid(str(error)) from None

    @property
    def is_own(self) -> bool:
        """Whether the loss is a function of the user's."""
        return self.name is not None and ":" in self.name

    @property
    def is_of_numbers(self) -> bool:
        """Whether the model predicts numbers, for which accuracy means nothing."""
        if self.name in BUILT_IN:
            return self.name in OF_NUMBERS
        return self.targets == "numbers"

    def check(self) -> None:
        """Import a function of the user's.

        Raises:
            PipelineInvalid: it cannot be imported.
        """
        if self.is_own:
            self._own()

    def identity(self) -> list[JsonValue]:
        """Return what decides the loss beside data and model: its name, and the user's code."""
        code = ""
        if self.is_own:
            from compress.core.factory import local_sources, sources_digest

            code = sources_digest(local_sources(str(self.name), self.folder))
        return [self.name, code]

    def settled(self, data: Splits | None) -> Loss:
        """Return the same loss, with the kind of the data's targets where no name was given.

        So that every batch, process and split gets the same loss, whatever its own targets are.
        """
        if self.targets is not None or self.name in BUILT_IN or data is None:
            return self
        targets = sampled_targets(data)
        return self if targets is None else replace(self, targets=kind_of(targets))

    def name_for(self, outputs: torch.Tensor, targets: torch.Tensor) -> str:
        """Return the loss's name; without one, what fits the targets.

        Whole numbers are labels: `cross_entropy`, or `binary_cross_entropy` where the model gives
        one output for each. Floats that are all 0 or 1 are `binary_cross_entropy`, probabilities
        `cross_entropy`, other floats `mse`.

        Raises:
            StageFailed: nothing fits.
        """
        if self.name is not None:
            return self.name
        kind = self.targets or kind_of(targets)
        if kind == "labels":
            name = "cross_entropy" if are_classes(outputs, targets) else "binary_cross_entropy"
        else:
            name = {"binary": "binary_cross_entropy", "probabilities": "cross_entropy"}.get(
                kind, "mse"
            )
        if name == "cross_entropy" or same_elements(outputs, targets):
            return name
        raise StageFailed(
            f"no loss fits outputs {form_of(outputs)} and targets {form_of(targets)}; expected "
            "labels without the outputs' axis 1 of classes, or targets of the outputs' shape; "
            "change one of them, or write loss: module:callable"
        )

    def function(self) -> Mean:
        """Return the function that computes the mean; a user's own is imported now.

        It raises StageFailed where outputs and targets do not fit it.
        """
        if self.is_own:
            return partial(_own_mean, self._own(), str(self.name))
        return partial(_mean, self)

    def summed(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
        """Return the sum over all targets that count, and their number.

        Raises:
            StageFailed: outputs and targets do not fit the loss.
        """
        if self.is_own:
            return float(self.function()(outputs, targets)) * len(targets), len(targets)
        name = self.name_for(outputs, targets)
        outputs, targets = fitted(name, outputs, targets)
        values = _elements(name, outputs, targets, "none")
        return float(values.double().sum()), _counted(name, targets)

    def _own(self) -> Any:
        from compress.core.factory import resolve

        return resolve(str(self.name), self.folder)


INFERRED = Loss()
"""The loss that follows from the targets."""


def sampled_targets(data: Splits) -> torch.Tensor | None:
    """Return targets of some samples that are trained on; None where they have none."""
    import torch

    name = next((n for n in ("train", "val") if n in data.datasets), next(iter(data.datasets)))
    count = len(data.stored(name))  # type: ignore[arg-type]  # Splits admits sized datasets only
    # At random, as what is evenly spaced may fall in with the order of the classes.
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    indices = sorted(order[:SAMPLES].tolist())
    found = [b.target for b in data.read(name, indices, data.batch_size) if b.target is not None]
    # Padded batches differ in length: what kind targets are does not depend on their shapes.
    same = [target for target in found if target.shape[1:] == found[0].shape[1:]]
    return torch.cat(same) if same else None


def kind_of(targets: torch.Tensor) -> Targets:
    """Return what targets are, by their element type, and of floats by their values.

    NaN stands for samples without a target.
    """
    if not targets.is_floating_point():
        return "labels"
    targets = targets[with_target(targets)]
    if targets.dim() > 1 and targets.shape[1] > 1 and _are_probabilities(targets):
        return "probabilities"
    return "binary" if bool(((targets == 0) | (targets == 1)).all()) else "numbers"


def fitted(
    name: str, outputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and targets in the types and shapes that a built-in loss takes.

    Raises:
        StageFailed: they do not fit; the message says what would.
    """
    import torch

    if outputs.dtype in (torch.float16, torch.bfloat16):
        outputs = outputs.float()
    if name in ("cross_entropy", "nll"):
        return outputs, _fitted_to_classes(name, outputs, targets)
    if not same_elements(outputs, targets):
        raise StageFailed(
            f"{name} takes targets of the outputs' shape, found outputs {form_of(outputs)} and "
            f"targets {form_of(targets)}; {_advice(outputs, targets)}"
        )
    if name == "binary_cross_entropy":
        return _fitted_to_binary(outputs, targets)
    if not targets.is_floating_point():
        raise StageFailed(
            f"{name} takes targets that are numbers, found {form_of(targets)}; return floats "
            "(y.float()), or for labels use cross_entropy or binary_cross_entropy"
        )
    return outputs, targets.to(outputs.dtype).view(outputs.shape)


def refuse_settings(name: str, class_weights: object | None, label_smoothing: float | None) -> None:
    """Refuse settings of classes for a loss that has none of them.

    Raises:
        PipelineInvalid: they were set.
    """
    for setting, given, takers in (
        ("class_weights", class_weights, WEIGHTED),
        ("label_smoothing", label_smoothing, SMOOTHED),
    ):
        if given and name not in takers:
            raise PipelineInvalid(
                f"{setting} is for loss: {' or '.join(takers)}, found {name}; leave it out"
            )


def refuse_straight(loss: Loss) -> None:
    """Refuse a loss without a second derivative.

    Raises:
        StageFailed: it has none.
    """
    if loss.name == "l1":
        raise StageFailed(
            "importance: hessian needs a loss that is curved, and l1 is not; use importance: taylor"
        )


def form_of(tensor: torch.Tensor) -> str:
    """Return a tensor's element type and shape in words, its first axis as ``n``."""
    shape = ", ".join(["n", *map(str, tensor.shape[1:])] if tensor.dim() else [])
    return f"{str(tensor.dtype).removeprefix('torch.')} [{shape}]"


def _fitted_to_classes(name: str, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    from compress.core.batch import IGNORED_LABEL

    classes = outputs.shape[1] if outputs.dim() > 1 else 1
    if classes < 2:
        raise StageFailed(
            f"{name} takes at least two classes on axis 1 of the outputs, found outputs "
            f"{form_of(outputs)}; {_advice(outputs, targets)}"
        )
    if name == "nll" and float(outputs.detach().max()) > POSITIVE_LOG:
        raise StageFailed(
            "nll takes log-probabilities, which are never above 0, and the model's outputs reach "
            f"{float(outputs.detach().max()):.3g}; end it with log_softmax, or use cross_entropy"
        )
    if targets.is_floating_point():
        if name == "nll" or targets.shape != outputs.shape or not _are_probabilities(targets):
            soft = "" if name == "nll" else f", or probabilities {_shape_of(outputs)} that sum to 1"
            raise StageFailed(
                f"{name} takes whole numbers as labels{soft}, found targets {form_of(targets)} and "
                f"outputs {form_of(outputs)}; {_advice(outputs, targets)}"
            )
        return targets.to(outputs.dtype)
    if not are_classes(outputs, targets):
        raise StageFailed(
            f"{name} takes labels of shape {_shape_of(outputs[:, 0])} for outputs "
            f"{form_of(outputs)}, whose axis 1 has the classes, found targets {form_of(targets)}; "
            f"{_advice(outputs, targets)}"
        )
    labels = targets.long()
    wrong = labels[((labels < 0) | (labels >= classes)) & (labels != IGNORED_LABEL)]
    if wrong.numel():
        raise StageFailed(
            f"label {int(wrong[0])} is out of range: the model has {classes} classes, 0 to "
            f"{classes - 1} ({IGNORED_LABEL} is left out); give it as many classes as there are "
            "labels, or number them from 0"
        )
    return labels


def _fitted_to_binary(
    outputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    from compress.core.batch import IGNORED_LABEL

    targets = targets.reshape(outputs.shape)
    if not targets.is_floating_point():
        known = targets != IGNORED_LABEL
        outputs, targets = outputs[known], targets[known]
    wrong = targets[~((targets >= 0) & (targets <= 1))]
    if wrong.numel():
        raise StageFailed(
            f"binary_cross_entropy takes targets from 0 to 1, found {float(wrong.view(-1)[0]):g}; "
            "for numbers use mse, l1 or smooth_l1 (with floats), for more than two classes one "
            "output for each and cross_entropy"
        )
    return outputs, targets.to(outputs.dtype)


def _advice(outputs: torch.Tensor, targets: torch.Tensor) -> str:
    """Return what would fit these outputs and targets."""
    kind, is_same = kind_of(targets), same_elements(outputs, targets)
    if kind == "labels" and are_classes(outputs, targets):
        return "for labels use cross_entropy"
    if kind == "numbers" and is_same:
        return "for numbers use mse, l1 or smooth_l1"
    if kind in ("labels", "binary") and is_same:
        return "for one yes or no per output use binary_cross_entropy"
    if outputs.dim() > 1 and outputs.shape[1] > 1:
        return (
            f"for classes return labels as whole numbers of shape {_shape_of(outputs[:, 0])}, "
            f"otherwise targets of shape {_shape_of(outputs)}"
        )
    return f"return targets of shape {_shape_of(outputs)}"


def _mean(
    loss: Loss,
    outputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    class_weights: torch.Tensor | None = None,
    label_smoothing: float | None = None,
    over_all: bool = False,
) -> torch.Tensor:
    name = loss.name_for(outputs, targets)
    refuse_settings(name, class_weights is not None, label_smoothing)
    samples = len(targets)
    if over_all and targets.is_floating_point():
        known = with_target(targets)
        outputs, targets = outputs[known], targets[known]
    outputs, fitting = fitted(name, outputs, targets)
    settings: dict[str, Any] = {}
    if class_weights is not None:
        if len(class_weights) != outputs.shape[1]:
            raise StageFailed(
                f"class_weights has {len(class_weights)} numbers and the model {outputs.shape[1]} "
                "classes; give one for each"
            )
        settings["weight"] = class_weights.to(outputs.dtype)
    if name in SMOOTHED:
        smoothing = DEFAULT_SMOOTHING if label_smoothing is None else label_smoothing
        settings["label_smoothing"] = smoothing
    if not _counted(name, fitting):
        return outputs.sum() * 0  # every target is left out, and torch's mean would be 0 / 0
    if over_all or class_weights is not None:
        # Not torch's weighted mean, which divides by the weights met in a batch: a step's loss
        # would depend on how the step is shared out.
        soft = name in WEIGHTED and targets.is_floating_point()
        places = targets[0].numel() // (targets.shape[1] if soft else 1) * samples
        return _elements(name, outputs, fitting, "sum", **settings) / places
    return _elements(name, outputs, fitting, "mean", **settings)


def _own_mean(
    function: Any,
    name: str,
    outputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    class_weights: torch.Tensor | None = None,
    label_smoothing: float | None = None,
    over_all: bool = False,
) -> torch.Tensor:
    import torch

    refuse_settings(name, class_weights is not None, label_smoothing)
    share = 1.0
    if over_all:
        known = with_target(targets)
        if not bool(known.any()):
            return outputs.sum() * 0
        share = float(known.sum()) / len(known)
        outputs, targets = outputs[known], targets[known]
    try:
        value = function(outputs, targets)
    except CompressError:
        raise
    except Exception as error:
        raise StageFailed(
            f"loss {name!r} fails for outputs {form_of(outputs)} and targets {form_of(targets)}: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = form_of(value) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise StageFailed(f"loss {name!r} returned {found}, expected a tensor with one number")
    return value.reshape(()) * share


def _elements(
    name: str, outputs: torch.Tensor, targets: torch.Tensor, reduction: str, **settings: Any
) -> torch.Tensor:
    import torch.nn.functional as F

    functions: dict[str, Any] = {
        "cross_entropy": F.cross_entropy,
        "binary_cross_entropy": F.binary_cross_entropy_with_logits,
        "nll": F.nll_loss,
        "mse": F.mse_loss,
        "l1": F.l1_loss,
        "smooth_l1": F.smooth_l1_loss,
    }
    value: torch.Tensor = functions[name](outputs, targets, reduction=reduction, **settings)
    return value


def _counted(name: str, targets: torch.Tensor) -> int:
    """Return how many targets count: labels that are not left out, rows of probabilities, numbers.

    Args:
        name: a built-in loss.
        targets: as :func:`fitted` returns them.
    """
    from compress.core.batch import IGNORED_LABEL

    if name not in WEIGHTED:
        return targets.numel()
    if targets.is_floating_point():
        return targets.numel() // targets.shape[1]
    return int((targets != IGNORED_LABEL).sum())


def with_target(targets: torch.Tensor) -> torch.Tensor:
    """Return which samples have a target: a label, or numbers."""
    from compress.core.batch import IGNORED_LABEL

    missing = targets.isnan() if targets.is_floating_point() else targets == IGNORED_LABEL
    return ~missing.reshape(len(targets), -1).all(1)


def are_classes(outputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether targets have the outputs' shape without axis 1, which has two classes or more."""
    shape = outputs.shape
    return len(shape) > 1 and shape[1] > 1 and targets.shape == shape[:1] + shape[2:]


def same_elements(outputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether shapes are equal but for axes of size 1 after the first."""
    shapes = [x.shape[:1] + tuple(n for n in x.shape[1:] if n != 1) for x in (outputs, targets)]
    return bool(outputs.dim()) and shapes[0] == shapes[1]


def _are_probabilities(targets: torch.Tensor) -> bool:
    sums = targets.double().sum(1)
    return bool((targets >= 0).all()) and bool(((sums - 1).abs() <= SUM_TOLERANCE).all())


def _shape_of(tensor: torch.Tensor) -> str:
    return form_of(tensor).partition(" ")[2]
