"""The loss of a task, by name: what training minimizes and what the metric `loss` measures.

Shapes: axis 0 of outputs and targets is the batch, and axis 1 of the outputs has the classes, as in
torch. A loss is a mean over samples, or over the labels that are not ignored: weighted by the
number that :meth:`LossFunction.label_count` gives, the means of parts add up to that of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from compress.common.errors import CompressError, PipelineInvalid, StageFailed, first_line
from compress.common.factories import NameOrReference
from compress.common.forward import first_output, output_argument
from compress.common.requirements import announcing_package
from compress.core.objectives.losses import (
    LossKind,
    loss_kind,
    loss_kinds,
    refuse_class_settings,
)
from compress.core.objectives.targets import (
    TargetKind,
    are_class_labels,
    describe_outputs,
    describe_targets,
    describe_tensor,
    has_target,
    need_tensor,
    same_shape,
    sampled_targets,
    suggest_targets,
    target_kind,
)
from compress.core.objectives.task import infer_loss, infer_task

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from pydantic import JsonValue

    from compress.common.forward import Outputs
    from compress.common.signature import Signature
    from compress.core.objectives.task import Task
    from compress.data.splits import Splits
    from compress.data.targets import Targets

DEFAULT_SMOOTHING = 0.1


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
    Several outputs are a mapping by name, one is a tensor. Without a name the loss follows from the
    targets: see :meth:`name_for`.
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
        if self.is_custom:
            self._import_custom()

    def identity(self) -> dict[str, JsonValue]:
        """Return the loss's part of a cache key: its name, and a hash of the user's code."""
        code = announcing_package("compress.losses", self.name or "")
        if self.is_custom:
            from compress.common.factories import local_sources, sources_digest

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

        Raises:
            StageFailed: nothing fits, or the task has no default.
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
            f"no loss fits outputs {describe_tensor(outputs)} and targets "
            f"{describe_tensor(targets)}; {suggest_targets(outputs, targets)}, or write "
            "loss: module:callable"
        )

    def align(
        self, outputs: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs and targets as built-in losses and metrics take them, by the task."""
        return (outputs, targets) if self.task is None else self.task.align(outputs, targets)

    def function(self) -> LossFunction:
        """Return the function, which raises StageFailed where outputs and targets do not fit it."""
        return LossFunction(self, self._import_custom() if self.is_custom else None)

    def sums_and_counts(self, outputs: Outputs, targets: Targets) -> torch.Tensor:
        """Return the sum of the loss over targets that are not ignored, and their number.

        By sample, `(2, samples)`, in float64; of the user's own loss for all together, `(2, 1)`.
        """
        import torch

        from compress.data.batch import IGNORED_LABEL

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

    def _import_custom(self) -> Any:
        from compress.common.factories import resolve

        return resolve(str(self.name), self.folder)


INFERRED_LOSS = Loss()
"""The loss that is inferred from the targets."""


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
            return self._mean_of_custom(outputs, targets, over_all=over_all)
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
            smoothing = DEFAULT_SMOOTHING if label_smoothing is None else label_smoothing
            settings["label_smoothing"] = smoothing
        known = kind.count(matched)
        if not known:
            return first.sum() * 0  # every target is ignored, and torch's mean would be 0 / 0
        if over_all:
            is_soft = kind.takes_class_weights and targets.is_floating_point()
            known = targets[0].numel() // (targets.shape[1] if is_soft else 1) * samples
        elif class_weights is None:
            return kind.compute(first, matched, "mean", **settings)
        # Not torch's weighted mean, which divides by the sum of the weights: a weight of 2 for all
        # classes doubles the loss.
        return kind.compute(first, matched, "sum", **settings) / known

    def _mean_of_custom(
        self, outputs: Outputs, targets: Targets, *, over_all: bool
    ) -> torch.Tensor:
        """Call the user's own loss, with ``over_all`` on the samples that have a target."""
        import torch

        from compress.data.targets import select

        tensors = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
        # The mean over nothing would be 0 / 0. All outputs, so that it depends on all weights.
        zero = (
            sum((x.sum() for x in tensors if x.is_floating_point()), tensors[0].new_zeros(())) * 0
        )
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
        return self._call_custom(tensors, targets) * share

    def _call_custom(self, outputs: Sequence[torch.Tensor], targets: Targets) -> torch.Tensor:
        import torch

        argument = output_argument(outputs, self.loss.outputs)
        try:
            value = self.custom(argument, targets)
        except CompressError:
            raise
        except Exception as error:
            raise StageFailed(
                f"loss {self.loss.name!r} fails for outputs {describe_outputs(argument)} and "
                f"targets {describe_targets(targets)}: {type(error).__name__}: {first_line(error)}"
            ) from error
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            is_tensor = isinstance(value, torch.Tensor)
            found = describe_tensor(value) if is_tensor else f"a {type(value).__name__}"
            raise StageFailed(
                f"loss {self.loss.name!r} returned {found}, expected a tensor with one number"
            )
        return value.reshape(())

    def label_count(self, targets: Targets) -> torch.Tensor | None:
        """Return what the mean over a batch with these targets is divided by, a scalar.

        None if that is the number of samples, all of one size: for targets that are floats, and
        for ``module:callable`` without an attribute ``count``.
        """
        from compress.data.batch import IGNORED_LABEL

        if self.custom is not None:
            return self._custom_count(targets)
        if self.loss.task is not None and self.loss.task.next_token:
            targets = need_tensor("loss", targets)[:, 1:]  # nothing precedes the first token
        if isinstance(targets, list | dict):
            return None  # refused by the loss itself, which has a name
        return None if targets.is_floating_point() else (targets != IGNORED_LABEL).sum()

    def _custom_count(self, targets: Targets) -> torch.Tensor | None:
        """Return the ``count`` of the user's function for some targets; None if it has none."""
        import torch

        count = getattr(self.custom, "count", None)
        if not callable(count):
            return None
        try:
            value = torch.as_tensor(count(targets))
        except Exception as error:
            raise StageFailed(
                f"count of loss {self.loss.name!r} fails for targets {describe_targets(targets)}: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from error
        if value.numel() != 1:
            raise StageFailed(
                f"count of loss {self.loss.name!r} returned {describe_tensor(value)}, expected "
                "one number"
            )
        return value.reshape(())
