"""Losses: :class:`LossKind`, the built-in ones, and :class:`Loss`, that of a task by its name.

Shapes: axis 0 of outputs and targets is the batch, and axis 1 of the outputs has the classes, as in
torch. A loss is a mean over samples, or over the labels that are not ignored: weighted by the
number that :meth:`LossFunction.label_count` gives, the means of parts add up to that of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.factories import NameOrReference, local_sources, resolve, sources_digest
from compress.common.forward import first_output, output_argument
from compress.common.lazy_modules import F, torch
from compress.common.requirements import announced, announcing_package
from compress.core.objectives.task import (
    TargetKind,
    are_class_labels,
    are_probabilities,
    describe_pair,
    describe_targets,
    describe_tensor,
    has_target,
    infer_loss,
    infer_task,
    need_tensor,
    refuse_wrong_labels,
    same_shape,
    sampled_targets,
    shape_of,
    suggest_targets,
    target_kind,
    user_errors,
)
from compress.data.batch import IGNORED_LABEL
from compress.data.targets import select

if TYPE_CHECKING:
    from pydantic import JsonValue

    from compress.common.forward import Outputs
    from compress.common.signature import Signature
    from compress.core.objectives.task import Pair, Task
    from compress.data.splits import Splits
    from compress.data.targets import Targets


class LossKind:
    """A loss of the first output, element by element: an entry point of ``compress.losses``."""

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

    def match(self, outputs: torch.Tensor, targets: torch.Tensor) -> Pair:
        """Cast and reshape outputs and targets to what the loss takes, or raise StageFailed."""
        # 16 bits are too few for exponentials and sums.
        if outputs.is_floating_point() and outputs.itemsize == 2:
            outputs = outputs.float()
        return self._match(outputs, targets)

    def _match(self, outputs: torch.Tensor, targets: torch.Tensor) -> Pair:
        if not same_shape(outputs, targets):
            raise StageFailed(
                f"{self.name} takes targets of the outputs' shape, found "
                f"{describe_pair(outputs, targets)}; {suggest_targets(outputs, targets)}"
            )
        return outputs, targets.reshape(outputs.shape)

    def count(self, targets: torch.Tensor) -> int:
        """Count what the mean is over, of targets as matched: the elements."""
        return targets.numel()

    def compute(
        self, outputs: torch.Tensor, targets: torch.Tensor, reduction: str, **settings: Any
    ) -> torch.Tensor:
        """Compute the loss of matched outputs and targets with torch's reduction and settings."""
        value: torch.Tensor = getattr(F, self.torch_function)(
            outputs, targets, reduction=reduction, **settings
        )
        return value


class ClassLoss(LossKind):
    """A loss of classes that exclude each other, on axis 1."""

    takes_class_weights = True
    takes_probabilities: ClassVar[bool] = False

    def _match(self, outputs: torch.Tensor, targets: torch.Tensor) -> Pair:
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
        if largest > 1e-3:  # rounding may lift the logarithm of a probability of 1 above 0
            raise StageFailed(
                "nll takes log-probabilities, which are never above 0, and the model's outputs "
                f"reach {largest:.3g}; end it with log_softmax, or use cross_entropy"
            )


class BinaryCrossEntropy(LossKind):
    """The cross-entropy of each output's logit, to yes or no."""

    torch_function = "binary_cross_entropy_with_logits"

    def _match(self, outputs: torch.Tensor, targets: torch.Tensor) -> Pair:
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

    def _match(self, outputs: torch.Tensor, targets: torch.Tensor) -> Pair:
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


def refuse_class_settings(name: str, class_weights: object, label_smoothing: float | None) -> None:
    """Raise PipelineInvalid if class weights or label smoothing are set for a loss without them."""
    settings = {"class_weights": class_weights, "label_smoothing": label_smoothing}
    for setting, value in settings.items():
        takers = [n for n, kind in loss_kinds().items() if getattr(kind, f"takes_{setting}")]
        if value and name not in takers:
            raise PipelineInvalid(
                f"{setting} is for loss: {' or '.join(takers)}, found {name}; leave it out"
            )


LOSS_NAME = NameOrReference("loss", lambda: tuple(loss_kinds()))
LossName = Annotated[str, LOSS_NAME]
"""Name of a loss, or ``module:callable`` (outputs, targets → scalar)."""


@dataclass(frozen=True)
class Loss:
    """A loss by name, resolved where it is needed.

    Names are those of torch: ``cross_entropy`` and ``binary_cross_entropy`` of logits, ``nll`` of
    log-probabilities, ``mse``, ``l1``, ``smooth_l1``; they read the first output.
    ``module:callable`` takes outputs and targets of a batch, and returns the mean over its samples,
    or over as many items as the callable's attribute ``count``, a function of the targets, returns.
    Several outputs are a mapping by name. Without a name it follows from the targets: `name_for`.
    """

    name: str | None = None
    targets: TargetKind | None = None
    """Kind of the data's targets; None until :meth:`infer_targets` has read some of them."""
    folder: Path | None = None
    """Where the module of ``module:callable`` lies."""
    task: Task | None = None
    """What the model is for: which losses fit, and which axis has the classes."""
    outputs: tuple[str, ...] = ()
    """Names of the model's outputs, for ``module:callable``; see :meth:`for_model`."""

    def __post_init__(self) -> None:
        if self.name is not None:
            try:
                LOSS_NAME.check(self.name)
            except ValueError as error:
                raise PipelineInvalid(str(error)) from None
        fitting = self.task.losses if self.task else ()
        if self.task and fitting and self.kind and self.name not in fitting:
            raise PipelineInvalid(
                f"task: {self.task.name} takes {', '.join(fitting)} or module:callable, found "
                f"{self.name}"
            )

    @property
    def is_custom(self) -> bool:
        """Whether the loss is the user's own function."""
        return self.name is not None and ":" in self.name

    @property
    def kind(self) -> LossKind | None:
        """The named loss; None for the user's own function, and without a name."""
        return None if self.name is None or self.is_custom else loss_kind(self.name)

    @property
    def is_regression(self) -> bool:
        """Whether the model predicts numbers, for which accuracy is not defined."""
        if self.kind is not None:
            return self.kind.of_numbers
        if self.task is not None:
            return self.task.name == "regression"
        return self.targets == "numbers"

    def check(self) -> None:
        """Import the user's own function; raise PipelineInvalid where it cannot be imported."""
        self.function()

    def identity(self) -> dict[str, JsonValue]:
        """Return the loss's part of a cache key: its name, and a hash of the user's code."""
        code = announcing_package("compress.losses", self.name or "")
        if self.is_custom:
            code = sources_digest(local_sources(str(self.name), self.folder))
        task = {} if self.task is None else {"task": self.task.name}
        return {"name": self.name, "code": code, **task}

    def infer_targets(self, data: Splits | None) -> Loss:
        """Return the same loss with the kind of the data's targets, where no name was given.

        Where no task is known, it gets the one that the targets show, if they show one.
        """
        # Inferred once, so that every batch, process and split gets the same loss.
        if self.targets is not None or self.kind is not None or data is None:
            return self
        targets = sampled_targets(data)
        if targets is None:
            return self
        return replace(self, targets=target_kind(targets), task=self.task or infer_task(targets))

    def for_model(self, signature: Signature) -> Loss:
        """Return the same loss with the names of a model's outputs."""
        return replace(self, outputs=tuple(spec.name for spec in signature.outputs))

    def name_for(self, outputs: torch.Tensor, targets: Targets) -> str:
        """Return the loss's name; without one, the loss that fits outputs and targets.

        Whole numbers are labels: `cross_entropy`, or `binary_cross_entropy` where the model gives
        one output for each. Floats that are all 0 or 1 are `binary_cross_entropy`, probabilities
        `cross_entropy`, other floats `mse`; what does not fit the task is its first loss instead.
        StageFailed says where nothing fits, or the task has no default.
        """
        if self.name is not None:
            return self.name
        if self.task is not None and not self.task.losses:
            raise StageFailed(
                f"task: {self.task.name} has no default loss; write loss: module:callable"
            )
        if isinstance(targets, list | dict):
            raise StageFailed(
                f"no loss follows from targets that are {describe_targets(targets)}; write "
                "loss: module:callable, a function of outputs and targets that returns a scalar"
            )
        outputs, targets = self.align(outputs, targets)
        kind, has_classes = self.targets or target_kind(targets), are_class_labels(outputs, targets)
        name = infer_loss(kind, self.task, has_classes=has_classes)
        is_of_task = name != infer_loss(kind, None, has_classes=has_classes)
        if name and (is_of_task or name == "cross_entropy" or same_shape(outputs, targets)):
            return name
        raise StageFailed(
            f"no loss fits {describe_pair(outputs, targets)}; "
            f"{suggest_targets(outputs, targets)}, or write loss: module:callable"
        )

    def align(self, outputs: torch.Tensor, targets: torch.Tensor) -> Pair:
        """Return outputs and targets as built-in losses and metrics take them, by the task."""
        return (outputs, targets) if self.task is None else self.task.align(outputs, targets)

    def function(self) -> LossFunction:
        """Return the function, which raises StageFailed where outputs and targets do not fit it."""
        return LossFunction(self, resolve(str(self.name), self.folder) if self.is_custom else None)

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor:
        """Return the sum of the loss over targets that are not ignored, and their number.

        By sample, `(2, samples)`, in float64; of the user's own loss for all together, `(2, 1)`.
        """
        first = first_output(outputs)
        if self.is_custom:
            function = self.function()
            own = function.label_count(targets)
            count = len(first) if own is None else float(own)
            value = float(function(outputs, targets)) * count if count else 0.0
            return torch.tensor([[value], [count]], dtype=torch.float64)
        name = self.name_for(first, targets)
        first, aligned = self.align(first, need_tensor(f"loss {name}", targets))
        first, matched = loss_kind(name).match(first, aligned)
        values = loss_kind(name).compute(first, matched, "none").double()
        is_known = torch.ones_like(values, dtype=torch.bool)
        if not aligned.is_floating_point():
            is_known = aligned != IGNORED_LABEL
        by_label = values.new_zeros(is_known.shape)
        if values.numel() == is_known.numel():  # a binary loss leaves out the ignored labels itself
            values = values.reshape(is_known.shape)[is_known]
        by_label[is_known] = values
        return torch.stack([x.reshape(len(x), -1).sum(1).double() for x in (by_label, is_known)])


INFERRED_LOSS = Loss()  # the loss that is inferred from the targets


def refuse_without_curvature(loss: Loss) -> None:
    """Raise StageFailed if a loss has no second derivative, which Hessian importance needs."""
    if loss.kind is not None and not loss.kind.is_curved:
        raise StageFailed(
            f"importance: hessian needs a loss that is curved, and {loss.name} is not; use "
            "importance: taylor"
        )


@dataclass(frozen=True)
class LossFunction:
    """The mean loss: built-in ones of the first output, the user's own of all."""

    loss: Loss
    custom: Any
    """The user's own function; None where the loss is built in."""

    def __call__(
        self,
        outputs: Outputs,
        targets: Targets,
        *,
        class_weights: torch.Tensor | None = None,
        label_smoothing: float | None = None,
        over_all: bool = False,
    ) -> torch.Tensor:
        """Compute the mean, a scalar.

        The sum is divided by the number of labels that are not ignored; with class weights, one for
        each class, too, and not by the sum of the weights. Label smoothing is by default 0.1 for
        `cross_entropy`. ``over_all`` divides by the number of all targets, ignored ones included.
        """
        name = self.loss.name_for(first_output(outputs), targets)
        refuse_class_settings(name, class_weights is not None, label_smoothing)
        if self.custom is not None:
            return self._mean_of_custom(outputs, targets, over_all)
        first, targets = self.loss.align(
            first_output(outputs), need_tensor(f"loss {name}", targets)
        )
        samples = len(targets)
        # Built-in losses ignore labels of -100 by themselves; NaN would spread to the weights.
        if over_all and targets.is_floating_point():
            labelled = has_target(targets)
            if not bool(labelled.any()):
                return first.sum() * 0
            first, targets = first[labelled], targets[labelled]
        kind = loss_kind(name)
        first, matched = kind.match(first, targets)
        settings: dict[str, Any] = {}
        if class_weights is not None:
            if len(class_weights) != first.shape[1]:
                raise StageFailed(
                    f"class_weights has {len(class_weights)} numbers and the model "
                    f"{first.shape[1]} classes; give one for each"
                )
            settings["weight"] = class_weights.to(first.dtype)
        if kind.takes_label_smoothing:
            settings["label_smoothing"] = 0.1 if label_smoothing is None else label_smoothing
        known = kind.count(matched)
        if not known:
            return first.sum() * 0  # every target is ignored, and torch's mean would be 0 / 0
        if over_all:
            is_soft = kind.takes_class_weights and targets.is_floating_point()
            known = targets[0].numel() // (targets.shape[1] if is_soft else 1) * samples
        elif class_weights is None:
            return kind.compute(first, matched, "mean", **settings)
        # Not torch's mean, over the sum of the weights: a weight of 2 for all doubles the loss.
        return kind.compute(first, matched, "sum", **settings) / known

    def _mean_of_custom(self, outputs: Outputs, targets: Targets, over_all: bool) -> torch.Tensor:
        # With `over_all` on the samples that have a target.
        tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        # The mean over nothing would be 0 / 0. All outputs, so that it depends on all weights.
        sums = (x.sum() for x in tensors if x.is_floating_point())
        zero = sum(sums, tensors[0].new_zeros(())) * 0
        share = 1.0
        size = targets.numel() if isinstance(targets, torch.Tensor) else None
        if over_all:
            labelled = has_target(targets)
            if not bool(labelled.any()):
                return zero
            tensors, targets = [x[labelled] for x in tensors], select(targets, labelled)
            share = float(labelled.double().mean())
        count = self._custom_count(targets)
        if count is not None and not count:
            return zero
        if count is not None and over_all and size is not None:
            share = float(count) / size
        argument = output_argument(tensors, self.loss.outputs)
        with user_errors(f"loss {self.loss.name!r}", argument, targets):
            value = self.custom(argument, targets)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            is_tensor = isinstance(value, torch.Tensor)
            found = describe_tensor(value) if is_tensor else f"a {type(value).__name__}"
            raise StageFailed(
                f"loss {self.loss.name!r} returned {found}, expected a tensor with one number"
            )
        return value.reshape(()) * share

    def label_count(self, targets: Targets) -> torch.Tensor | None:
        """Return what the mean over a batch with these targets is divided by, a scalar.

        None if that is the number of samples, all of one size: for targets that are floats, and
        for ``module:callable`` without an attribute ``count``.
        """
        if self.custom is not None:
            return self._custom_count(targets)
        if self.loss.task is not None and self.loss.task.next_token:
            targets = need_tensor("loss", targets)[:, 1:]  # nothing precedes the first token
        if isinstance(targets, list | dict):
            return None  # refused by the loss itself, which has a name
        return None if targets.is_floating_point() else (targets != IGNORED_LABEL).sum()

    def _custom_count(self, targets: Targets) -> torch.Tensor | None:
        count = getattr(self.custom, "count", None)
        if not callable(count):
            return None
        with user_errors(f"count of loss {self.loss.name!r}", None, targets):
            value = torch.as_tensor(count(targets))
        if value.numel() != 1:
            raise StageFailed(
                f"count of loss {self.loss.name!r} returned {describe_tensor(value)}, expected "
                "one number"
            )
        return value.reshape(())
