"""The built-in losses, one class each, and those that other packages announce.

A loss is a subclass of :class:`LossKind` and an entry point of the group ``compress.losses`` under
its name. Shapes: axis 0 of outputs and targets is the batch, and axis 1 of the outputs has the
classes, as in torch.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.requirements import announced
from compress.core.objectives.targets import (
    are_class_labels,
    are_probabilities,
    describe_tensor,
    refuse_wrong_labels,
    same_shape,
    shape_of,
    suggest_targets,
)

if TYPE_CHECKING:
    import torch

POSITIVE_LOG = 1e-3
"""Rounding may lift the logarithm of a probability of 1 above 0."""


class LossKind:
    """A loss of the first output, element by element, with what it takes."""

    torch_function: ClassVar[str]
    """Name of the function in ``torch.nn.functional`` that computes it."""
    of_numbers: ClassVar[bool] = False
    """Whether the model predicts numbers; the loss then tells the task."""
    takes_class_weights: ClassVar[bool] = False
    takes_label_smoothing: ClassVar[bool] = False
    is_curved: ClassVar[bool] = True
    """Whether it has a second derivative, which Hessian importance needs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def match(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cast and reshape outputs and targets to what the loss takes, or raise StageFailed."""
        import torch

        # 16 bits are too few for exponentials and sums.
        if outputs.dtype in (torch.float16, torch.bfloat16):
            outputs = outputs.float()
        return self._match(outputs, targets)

    def _match(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not same_shape(outputs, targets):
            raise StageFailed(
                f"{self.name} takes targets of the outputs' shape, found outputs "
                f"{describe_tensor(outputs)} and targets {describe_tensor(targets)}; "
                f"{suggest_targets(outputs, targets)}"
            )
        return outputs, targets.reshape(outputs.shape)

    def count(self, targets: torch.Tensor) -> int:
        """Count what the mean is over, of targets as matched: the elements."""
        return targets.numel()

    def compute(
        self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str, **settings: Any
    ) -> torch.Tensor:
        """Compute the loss of matched outputs and targets with torch's reduction and settings."""
        import torch.nn.functional as F

        value: torch.Tensor = getattr(F, self.torch_function)(
            outputs, targets, reduction=reduction, **settings
        )
        return value


class ClassLoss(LossKind):
    """A loss of classes that exclude each other, on axis 1."""

    takes_class_weights = True
    takes_probabilities: ClassVar[bool] = False

    def _match(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return labels as int64, or class probabilities in the outputs' dtype."""
        classes = outputs.shape[1] if outputs.dim() > 1 else 1
        if classes < 2:
            raise StageFailed(
                f"{self.name} takes at least two classes on axis 1 of the outputs, found outputs "
                f"{describe_tensor(outputs)}; {suggest_targets(outputs, targets)}"
            )
        self._check_outputs(outputs)
        if targets.is_floating_point():
            is_soft = self.takes_probabilities and targets.shape == outputs.shape
            if not is_soft or not are_probabilities(targets):
                soft = f", or probabilities {shape_of(outputs)} that sum to 1"
                raise StageFailed(
                    f"{self.name} takes whole numbers as labels"
                    f"{soft if self.takes_probabilities else ''}, found targets "
                    f"{describe_tensor(targets)} and outputs {describe_tensor(outputs)}; "
                    f"{suggest_targets(outputs, targets)}"
                )
            return outputs, targets.to(outputs.dtype)
        if not are_class_labels(outputs, targets):
            raise StageFailed(
                f"{self.name} takes labels of shape {shape_of(outputs[:, 0])} for outputs "
                f"{describe_tensor(outputs)}, whose axis 1 has the classes, found targets "
                f"{describe_tensor(targets)}; {suggest_targets(outputs, targets)}"
            )
        refuse_wrong_labels(targets, classes)
        return outputs, targets.long()

    def _check_outputs(self, outputs: torch.Tensor) -> None:
        """Raise StageFailed for outputs that the loss does not take."""

    def count(self, targets: torch.Tensor) -> int:
        """Count labels that are not ignored, or rows of probabilities."""
        from compress.data.batch import IGNORED_LABEL

        if targets.is_floating_point():
            return targets.numel() // targets.shape[1]
        return int((targets != IGNORED_LABEL).sum())

    def compute(
        self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str, **settings: Any
    ) -> torch.Tensor:
        """Compute the loss, with the classes on the last axis where they lie side by side."""
        are_side_by_side = outputs.dim() > 2 and outputs.stride(1) == 1  # a language model's
        if are_side_by_side and not targets.is_floating_point():
            # torch's kernels (2.13) for another axis than the last took 28 % of a training step on
            # an H200 (1.3 G weights, 32 thousand classes), and 3 to 4 times as long on a CPU.
            outputs, targets = outputs.movedim(1, -1).flatten(0, -2), targets.flatten()
        return super().compute(outputs, targets, reduction, **settings)


class CrossEntropy(ClassLoss):
    """The cross-entropy of logits, to labels or probabilities."""

    torch_function = "cross_entropy"
    takes_label_smoothing = takes_probabilities = True


class NegativeLogLikelihood(ClassLoss):
    """The negative log-likelihood of log-probabilities."""

    torch_function = "nll_loss"

    def _check_outputs(self, outputs: torch.Tensor) -> None:
        largest = float(outputs.detach().max())
        if largest > POSITIVE_LOG:
            raise StageFailed(
                "nll takes log-probabilities, which are never above 0, and the model's outputs "
                f"reach {largest:.3g}; end it with log_softmax, or use cross_entropy"
            )


class BinaryCrossEntropy(LossKind):
    """The cross-entropy of each output's logit, to yes or no."""

    torch_function = "binary_cross_entropy_with_logits"

    def _match(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and targets of one shape, integer targets without the ignored ones."""
        from compress.data.batch import IGNORED_LABEL

        outputs, targets = super()._match(outputs, targets)
        if not targets.is_floating_point():
            is_known = targets != IGNORED_LABEL
            outputs, targets = outputs[is_known], targets[is_known]
        wrong = targets[~((targets >= 0) & (targets <= 1))]
        if wrong.numel():
            raise StageFailed(
                "binary_cross_entropy takes targets from 0 to 1, found "
                f"{float(wrong.view(-1)[0]):g}; for numbers use mse, l1 or smooth_l1 (with "
                "floats), for more than two classes one output for each and cross_entropy"
            )
        return outputs, targets.to(outputs.dtype)


class NumberLoss(LossKind):
    """A distance between numbers."""

    of_numbers = True

    def _match(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, matched = super()._match(outputs, targets)
        if not targets.is_floating_point():
            raise StageFailed(
                f"{self.name} takes targets that are numbers, found {describe_tensor(targets)}; "
                "return floats (y.float()), or for labels use cross_entropy or "
                "binary_cross_entropy"
            )
        return outputs, matched.to(outputs.dtype)


class MeanSquaredError(NumberLoss):
    """The squared error."""

    torch_function = "mse_loss"


class MeanAbsoluteError(NumberLoss):
    """The absolute error."""

    torch_function = "l1_loss"
    is_curved = False


class SmoothL1(NumberLoss):
    """The squared error of small differences, and the absolute one of large ones."""

    torch_function = "smooth_l1_loss"


@cache
def loss_kinds() -> dict[str, LossKind]:
    """Return every loss by its name; raise Unavailable if a package's is broken or clashes."""
    return {name: kind(name) for name, kind in announced("compress.losses", "loss").items()}


def loss_kind(name: str) -> LossKind:
    """Return a loss by its name, which must be known."""
    return loss_kinds()[name]


def refuse_class_settings(
    name: str, class_weights: object | None, label_smoothing: float | None
) -> None:
    """Raise PipelineInvalid if class weights or label smoothing are set for a loss without them."""
    kinds = loss_kinds()
    for setting, value, takers in (
        ("class_weights", class_weights, [n for n in kinds if kinds[n].takes_class_weights]),
        ("label_smoothing", label_smoothing, [n for n in kinds if kinds[n].takes_label_smoothing]),
    ):
        if value and name not in takers:
            raise PipelineInvalid(
                f"{setting} is for loss: {' or '.join(takers)}, found {name}; leave it out"
            )
