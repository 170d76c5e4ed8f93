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
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import AfterValidator, WithJsonSchema

from compress.common.errors import CompressError, PipelineInvalid, StageFailed, first_line
from compress.core.targets import (
    Targets,
    advice,
    are_classes,
    fitted,
    form_of,
    kind_of,
    same_elements,
    sampled_targets,
    with_target,
)

if TYPE_CHECKING:
    import torch
    from pydantic import JsonValue

    from compress.data.splits import Splits

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

    def identity(self) -> dict[str, JsonValue]:
        """Return what decides the loss beside data and model: its name, and the user's code."""
        code = ""
        if self.is_own:
            from compress.common.factories import local_sources, sources_digest

            code = sources_digest(local_sources(str(self.name), self.folder))
        return {"name": self.name, "code": code}

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
            f"no loss fits outputs {form_of(outputs)} and targets {form_of(targets)}; "
            f"{advice(outputs, targets)}, or write loss: module:callable"
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
        from compress.common.factories import resolve

        return resolve(str(self.name), self.folder)


INFERRED = Loss()
"""The loss that follows from the targets."""


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
        if not bool(known.any()):
            return outputs.sum() * 0
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
    from compress.data.batch import IGNORED_LABEL

    if name not in WEIGHTED:
        return targets.numel()
    if targets.is_floating_point():
        return targets.numel() // targets.shape[1]
    return int((targets != IGNORED_LABEL).sum())
