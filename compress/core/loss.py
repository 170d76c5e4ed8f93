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
from compress.core.task_targets import (
    TargetKind,
    are_class_labels,
    describe_tensor,
    has_target,
    match_to_loss,
    same_shape,
    sampled_targets,
    suggest_targets,
    target_kind,
)

if TYPE_CHECKING:
    import torch
    from pydantic import JsonValue

    from compress.data.splits import Splits

CLASSIFICATION_LOSSES = ("cross_entropy", "binary_cross_entropy", "nll")
"""Losses of classifiers."""
REGRESSION_LOSSES = ("mse", "l1", "smooth_l1")
"""Losses of models that predict numbers."""
BUILT_IN = (*CLASSIFICATION_LOSSES, *REGRESSION_LOSSES)
WEIGHTED = ("cross_entropy", "nll")
"""Losses that take class weights."""
SMOOTHED = ("cross_entropy",)
"""Losses that take label smoothing."""
DEFAULT_SMOOTHING = 0.1
REFERENCE = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
"""A user's function: ``module:callable``."""


class LossFunction(Protocol):
    """A function that returns a scalar loss, the mean over samples."""

    def __call__(
        self,
        outputs: torch.Tensor,
        targets: torch.Tensor,
        *,
        class_weights: torch.Tensor | None = None,
        label_smoothing: float | None = None,
        over_all: bool = False,
    ) -> torch.Tensor:
        """Compute the mean loss.

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


def _check_name(name: str) -> str:
    if name in BUILT_IN or REFERENCE.match(name):
        return name
    close = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    expected = f"{', '.join(BUILT_IN)} or module:callable"
    raise ValueError(f"unknown loss {name!r}; {hint}expected {expected}")


LossName = Annotated[
    str,
    AfterValidator(_check_name),
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
    targets: TargetKind | None = None
    """Kind of the data's targets; None until :meth:`infer_targets` has read some of them."""
    folder: Path | None = None
    """Where the module of ``module:callable`` lies."""

    def __post_init__(self) -> None:
        if self.name is not None:
            try:
                _check_name(self.name)
            except ValueError as error:
                raise PipelineInvalid(str(error)) from None

    @property
    def is_custom(self) -> bool:
        """Whether the loss is the user's own function."""
        return self.name is not None and ":" in self.name

    @property
    def is_regression(self) -> bool:
        """Whether the model predicts numbers, for which accuracy is not defined."""
        if self.name in BUILT_IN:
            return self.name in REGRESSION_LOSSES
        return self.targets == "numbers"

    def check(self) -> None:
        """Import the user's own function, where the loss is one.

        Raises:
            PipelineInvalid: it cannot be imported.
        """
        if self.is_custom:
            self._import_custom()

    def identity(self) -> dict[str, JsonValue]:
        """Return the loss's part of a cache key: its name, and a hash of the user's code."""
        code = ""
        if self.is_custom:
            from compress.common.factories import local_sources, sources_digest

            code = sources_digest(local_sources(str(self.name), self.folder))
        return {"name": self.name, "code": code}

    def infer_targets(self, data: Splits | None) -> Loss:
        """Return the same loss with the kind of the data's targets, where no name was given.

        It is inferred once, so that every batch, process and split gets the same loss.
        """
        if self.targets is not None or self.name in BUILT_IN or data is None:
            return self
        targets = sampled_targets(data)
        return self if targets is None else replace(self, targets=target_kind(targets))

    def name_for(self, outputs: torch.Tensor, targets: torch.Tensor) -> str:
        """Return the loss's name; without one, the loss that fits outputs and targets.

        Whole numbers are labels: `cross_entropy`, or `binary_cross_entropy` where the model gives
        one output for each. Floats that are all 0 or 1 are `binary_cross_entropy`, probabilities
        `cross_entropy`, other floats `mse`.

        Raises:
            StageFailed: nothing fits.
        """
        if self.name is not None:
            return self.name
        kind = self.targets or target_kind(targets)
        if kind == "labels":
            name = "cross_entropy" if are_class_labels(outputs, targets) else "binary_cross_entropy"
        else:
            name = {"binary": "binary_cross_entropy", "probabilities": "cross_entropy"}.get(
                kind, "mse"
            )
        if name == "cross_entropy" or same_shape(outputs, targets):
            return name
        raise StageFailed(
            f"no loss fits outputs {describe_tensor(outputs)} and targets "
            f"{describe_tensor(targets)}; {suggest_targets(outputs, targets)}, or write "
            "loss: module:callable"
        )

    def function(self) -> LossFunction:
        """Return the function that computes the mean loss; a user's own is imported now.

        The function raises StageFailed where outputs and targets do not fit it.
        """
        if self.is_custom:
            return partial(_custom_mean, self._import_custom(), str(self.name))
        return partial(_built_in_mean, self)

    def sum_and_count(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, int]:
        """Return the sum of the loss over all targets that are not ignored, and their number.

        Raises:
            StageFailed: outputs and targets do not fit the loss.
        """
        if self.is_custom:
            return float(self.function()(outputs, targets)) * len(targets), len(targets)
        name = self.name_for(outputs, targets)
        outputs, targets = match_to_loss(name, outputs, targets)
        values = _functional_loss(name, outputs, targets, "none")
        return float(values.double().sum()), _count_targets(name, targets)

    def _import_custom(self) -> Any:
        from compress.common.factories import resolve

        return resolve(str(self.name), self.folder)


INFERRED_LOSS = Loss()
"""The loss that is inferred from the targets."""


def refuse_class_settings(
    name: str, class_weights: object | None, label_smoothing: float | None
) -> None:
    """Check that class weights and label smoothing are set only for losses that take them.

    Raises:
        PipelineInvalid: the loss does not take one that is set.
    """
    for setting, value, takers in (
        ("class_weights", class_weights, WEIGHTED),
        ("label_smoothing", label_smoothing, SMOOTHED),
    ):
        if value and name not in takers:
            raise PipelineInvalid(
                f"{setting} is for loss: {' or '.join(takers)}, found {name}; leave it out"
            )


def refuse_without_curvature(loss: Loss) -> None:
    """Check that a loss has a second derivative, for Hessian importance.

    Raises:
        StageFailed: it has none.
    """
    if loss.name == "l1":
        raise StageFailed(
            "importance: hessian needs a loss that is curved, and l1 is not; use importance: taylor"
        )


def _built_in_mean(
    loss: Loss,
    outputs: torch.Tensor,
    targets: torch.Tensor,
    *,
    class_weights: torch.Tensor | None = None,
    label_smoothing: float | None = None,
    over_all: bool = False,
) -> torch.Tensor:
    name = loss.name_for(outputs, targets)
    refuse_class_settings(name, class_weights is not None, label_smoothing)
    samples = len(targets)
    if over_all and targets.is_floating_point():
        labelled = has_target(targets)
        if not bool(labelled.any()):
            return outputs.sum() * 0
        outputs, targets = outputs[labelled], targets[labelled]
    outputs, matched = match_to_loss(name, outputs, targets)
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
    if not _count_targets(name, matched):
        return outputs.sum() * 0  # every target is ignored, and torch's mean would be 0 / 0
    if over_all or class_weights is not None:
        # Not torch's weighted mean, which divides by the sum of the weights in a batch: the loss of
        # a step would depend on how it is split into micro-batches and processes.
        is_soft = name in WEIGHTED and targets.is_floating_point()
        count = targets[0].numel() // (targets.shape[1] if is_soft else 1) * samples
        return _functional_loss(name, outputs, matched, "sum", **settings) / count
    return _functional_loss(name, outputs, matched, "mean", **settings)


def _custom_mean(
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

    refuse_class_settings(name, class_weights is not None, label_smoothing)
    share = 1.0
    if over_all:
        labelled = has_target(targets)
        if not bool(labelled.any()):
            return outputs.sum() * 0
        share = float(labelled.sum()) / len(labelled)
        outputs, targets = outputs[labelled], targets[labelled]
    try:
        value = function(outputs, targets)
    except CompressError:
        raise
    except Exception as error:
        raise StageFailed(
            f"loss {name!r} fails for outputs {describe_tensor(outputs)} and targets "
            f"{describe_tensor(targets)}: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = (
            describe_tensor(value)
            if isinstance(value, torch.Tensor)
            else f"a {type(value).__name__}"
        )
        raise StageFailed(f"loss {name!r} returned {found}, expected a tensor with one number")
    return value.reshape(()) * share


def _functional_loss(
    name: str, outputs: torch.Tensor, targets: torch.Tensor, reduction: str, **settings: Any
) -> torch.Tensor:
    """Call the function of ``torch.nn.functional`` that a built-in loss names."""
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


def _count_targets(name: str, targets: torch.Tensor) -> int:
    """Count labels that are not ignored, rows of probabilities, or numbers.

    Args:
        name: a built-in loss.
        targets: as :func:`match_to_loss` returns them.
    """
    from compress.data.batch import IGNORED_LABEL

    if name not in WEIGHTED:
        return targets.numel()
    if targets.is_floating_point():
        return targets.numel() // targets.shape[1]
    return int((targets != IGNORED_LABEL).sum())
