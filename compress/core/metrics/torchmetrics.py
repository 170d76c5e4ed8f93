"""Metrics by torchmetrics, and the user's own: made for a model, and merged over processes."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, Self

from compress.common.errors import PipelineInvalid, Unavailable
from compress.common.forward import first_output, output_argument
from compress.common.requirements import pip_install
from compress.core.metrics.labels import label_decisions
from compress.core.metrics.metric import FunctionMeter, Metric, MetricMeter, one_number
from compress.core.objectives.losses import loss_kind
from compress.core.objectives.targets import need_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from compress.common.forward import Outputs
    from compress.data.targets import Targets

LARGEST_STATE = 2**15
"""Numbers of a metric's state at most that are kept for each group of samples."""


class Torchmetrics(Metric):
    """A class of the library by its name: ``torchmetrics.classification.BinaryF1Score``."""

    form = "torchmetrics.…"
    higher: ClassVar[bool | None] = None
    adds_states = True
    by_output: ClassVar[bool] = False
    """Whether the value has a number for each output, of which the mean is meant."""

    @classmethod
    def takes(cls, name: str, entry: str) -> bool:
        """Whether the name is a dotted one of the library."""
        return name.startswith("torchmetrics.")

    @property
    def path(self) -> str:
        """The class's name inside torchmetrics."""
        return self.name.partition(".")[2]

    @property
    def higher_is_better(self) -> bool:
        """Whether larger is better, by the pipeline or the class."""
        direction = self.direction
        if direction is None:
            direction = getattr(self.implementation(), "higher_is_better", None)
        if direction is None:
            raise PipelineInvalid(
                f"metric {self.name!r} does not tell its direction; write "
                f"metric: {{name: {self.name!r}, higher_is_better: true}} (or false)"
            )
        return bool(direction)

    def implementation(self, inferred: Mapping[str, Any] | None = None) -> Any:
        """Make the object of torchmetrics; `inferred` are arguments that follow from the data."""
        target = import_torchmetrics(self.name)
        for part in self.path.split("."):
            target = getattr(target, part, None)
        return create(self.name, target, {**(inferred or {}), **dict(self.arguments)})

    def compared(
        self, outputs: Outputs, targets: Targets
    ) -> tuple[Any, Targets, dict[str, Any] | None]:
        """Return what the object is updated with, and arguments of its class that fit it."""
        return first_output(outputs), targets, None

    def meter(self) -> MetricMeter:
        """Return what updates the object."""
        return TorchmetricsMeter(self, self.implementation())

    def check_settings(self) -> None:
        """Raise PipelineInvalid for a class or arguments that do not exist, or no direction."""
        self.implementation()
        _ = self.higher_is_better


class UserMetric(Torchmetrics):
    """``module:callable``: a function of all outputs and targets, or a class of torchmetrics."""

    form = "module:callable"
    # The updates of the user's own class may depend on how samples are divided.
    adds_states = False

    @classmethod
    def takes(cls, name: str, entry: str) -> bool:
        """Whether the name refers to the user's module."""
        return ":" in name

    @property
    def reads_all_outputs(self) -> bool:
        """The user's own get all outputs."""
        return True

    def code(self) -> str:
        """Return a hash of the module and of what it imports beside it."""
        from compress.common.factories import local_sources, sources_digest

        return sources_digest(local_sources(self.name, self.folder))

    def implementation(self, inferred: Mapping[str, Any] | None = None) -> Any:
        """Import the function, or make the object of torchmetrics."""
        from compress.common.factories import resolve

        target: Any = resolve(self.name, self.folder)
        if not isinstance(target, type):
            return target
        return create(self.name, target, dict(self.arguments))

    def compared(self, outputs: Outputs, targets: Targets) -> tuple[Any, Targets, None]:
        """Return all outputs, several by name."""
        return output_argument(outputs, self.outputs), targets, None

    def meter(self) -> MetricMeter:
        """Return what updates the object, or keeps the outputs for the function."""
        own = self.implementation()
        if hasattr(own, "metric_state"):
            return TorchmetricsMeter(self, own)
        return FunctionMeter(self, own, dict(self.arguments))


class _InferredArguments(Torchmetrics):
    """A class of torchmetrics whose arguments follow from outputs and targets."""

    form = ""
    higher = True
    torchmetrics_class: ClassVar[str]

    @classmethod
    def takes(cls, name: str, entry: str) -> bool:
        """Whether the name is that of the entry point."""
        return name == entry

    @property
    def path(self) -> str:
        """The class's name inside torchmetrics."""
        return self.torchmetrics_class

    @property
    def higher_is_better(self) -> bool:
        """Always."""
        return True

    def meter(self) -> MetricMeter:
        """Return what makes the object when the first batch shows its arguments."""
        return TorchmetricsMeter(self)

    def check_settings(self) -> None:
        """Raise Unavailable if the library is not installed."""
        import_torchmetrics(self.name)


class _LabelMetric(_InferredArguments):
    """A mean over classes."""

    is_fraction = in_points = reads_loss = True
    labels = "any"

    def compared(
        self, outputs: Outputs, targets: Targets
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return predicted and true labels."""
        targets = need_tensor(f"metric {self.name}", targets)
        first, targets = self.loss.align(first_output(outputs), targets)
        return labelled_inputs(first, label_decisions(self.name, first, targets, self.loss))


class F1(_LabelMetric):
    """The harmonic mean of precision and recall."""

    torchmetrics_class = "F1Score"


class MeanIoU(_LabelMetric):
    """Intersection over union of the pixels of each class."""

    torchmetrics_class = "JaccardIndex"


class Spearman(_InferredArguments):
    """The correlation of ranks of numbers."""

    torchmetrics_class = "SpearmanCorrCoef"
    by_output = True

    def compared(
        self, outputs: Outputs, targets: Targets
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Return predicted and true numbers, `(samples,)` or `(samples, outputs)`."""
        targets = need_tensor(f"metric {self.name}", targets)
        pair = loss_kind("mse").match(first_output(outputs), targets)
        first, targets = (x.reshape(len(x), -1) for x in pair)
        count = first.shape[1]
        if count == 1:
            first, targets = first[:, 0], targets[:, 0]
        return first, targets, {"num_outputs": count}


class TorchmetricsMeter(MetricMeter):
    """Updates an object of torchmetrics."""

    metric: Torchmetrics

    def __init__(self, metric: Torchmetrics, own: Any = None) -> None:
        super().__init__(metric)
        self.own = own
        self.inferred: dict[str, Any] | None = None

    def _add(self, outputs: Outputs, targets: Targets, group: int | None) -> None:
        compared, targets, self.inferred = self.metric.compared(outputs, targets)
        self.own = self.own or self.metric.implementation(self.inferred)
        before = None if group is None else summed_state(self.own)
        self.call(self.own.update, compared, targets)
        if before is not None and (now := summed_state(self.own)) is not None:
            self._add_group(group, now - before)

    def copy(self) -> Self:
        """Return a meter with an object of its own."""
        other = super().copy()
        other.own = copy.deepcopy(self.own)
        return other

    def set_sums_(self, sums: torch.Tensor) -> None:
        """Overwrite the object's state."""
        set_summed_state_(self.own, sums)

    def state(self) -> Any:
        """Return the object's state, with the arguments that it was made with."""
        if self.own is None or not self.own.update_called:
            return None
        return self.inferred, [module.metric_state for module in metrics_in(self.own)]

    def add_shares_(self, states: Sequence[Any]) -> None:
        """Merge the states of all processes."""
        known = [state for state in states if state is not None]
        if known:
            self.own = self.own or self.metric.implementation(known[0][0])
            merge_states_(self.own, [state for _, state in known])

    def compute(self) -> float:
        """Compute the object's value; the mean of several outputs of a model."""
        if self.own is None or not self.own.update_called:
            raise self.nothing_added()
        value = self.call(self.own.compute)
        return one_number(self.metric.name, value.mean() if self.metric.by_output else value)


def import_torchmetrics(name: str) -> Any:
    """Import the library for a metric; raise Unavailable if it is not installed."""
    try:
        import torchmetrics
    except ImportError:
        raise Unavailable(f"metric {name!r} needs torchmetrics: {pip_install('metrics')}") from None
    return torchmetrics


def create(name: str, target: Any, arguments: Mapping[str, Any]) -> Any:
    """Make an object of a class of torchmetrics; raise PipelineInvalid where that fails."""
    if not isinstance(target, type) or not issubclass(target, import_torchmetrics(name).Metric):
        raise PipelineInvalid(
            f"metric {name!r}: no such class of torchmetrics; expected one, a subclass of "
            "torchmetrics.Metric, or a function of outputs and targets"
        )
    try:
        with warnings.catch_warnings():
            # Of metrics that keep all outputs in memory.
            warnings.filterwarnings("ignore", ".*save all targets and predictions", UserWarning)
            made = target(**arguments)
    except Exception as error:
        raise PipelineInvalid(
            f"metric {name!r} with arguments {dict(arguments)}: {error}"
        ) from error
    for module in metrics_in(made):
        # Rank 0 may evaluate alone, and must not wait for other ranks in `compute`.
        module.distributed_available_fn = lambda: False
    return made


def labelled_inputs(
    outputs: torch.Tensor, decisions: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return predictions and targets for a metric of labels, and its arguments.

    Args:
        outputs: scores of classes on axis 1, or binary logits.
        decisions: predicted and true labels, booleans if outputs are binary logits.
    """
    import torch

    from compress.data.batch import IGNORED_LABEL

    labels, known = decisions
    several = {"average": "macro", "ignore_index": IGNORED_LABEL}
    if labels.dtype != torch.bool:
        classes = {"task": "multiclass", "num_classes": outputs.shape[1]}
        return labels.flatten(), known.flatten().long(), classes | several
    if outputs.dim() > 1 and outputs.shape[1] > 1:
        settings = {"task": "multilabel", "num_labels": outputs.shape[1]} | several
        return labels.long(), known.long(), settings
    binary = {"task": "binary", "ignore_index": IGNORED_LABEL}
    return labels.flatten().long(), known.flatten().long(), binary


def metrics_in(metric: Any) -> list[Any]:
    """Return an object of torchmetrics and those that it is computed from."""
    return [module for module in metric.modules() if hasattr(module, "metric_state")]


def summed_state(metric: Any) -> torch.Tensor | None:
    """Return the state of an object of torchmetrics as float64 numbers, if all of it is sums.

    None, too, where these are more than :data:`LARGEST_STATE`.
    """
    import torch
    from torchmetrics.utilities import dim_zero_sum

    values: list[torch.Tensor] = []
    for module in metrics_in(metric):
        for name, reduce in module._reductions.items():
            if reduce is not dim_zero_sum:
                return None
            values.append(getattr(module, name).double().flatten())
    return torch.cat(values) if 0 < sum(map(len, values)) <= LARGEST_STATE else None


def set_summed_state_(metric: Any, state: torch.Tensor) -> None:
    """Overwrite the state of an object of torchmetrics by what :func:`summed_state` returned."""
    start = 0
    for module in metrics_in(metric):
        for name in module._reductions:
            value = getattr(module, name)
            part = state[start : start + value.numel()].reshape(value.shape).to(value.dtype)
            setattr(module, name, part)
            start += value.numel()
        module._computed = None


def merge_states_(metric: Any, shares: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Overwrite the state of an object of torchmetrics by that of several shares of the samples."""
    import torch

    # As `Metric.sync` does. But that exchanges tensor by tensor, so that processes with lists of
    # different lengths wait for ever, and counts the initial state of one without samples; and
    # `Metric.merge_state` refuses some metrics.
    for module, *states in zip(metrics_in(metric), *shares, strict=True):
        module._update_count = module._update_count or 1  # this process may have no samples
        for name, reduce in module._reductions.items():
            values = [state[name] for state in states]
            if isinstance(values[0], list):
                setattr(module, name, [tensor for value in values for tensor in value])
            else:
                stacked = torch.stack(values)
                setattr(module, name, stacked if reduce is None else reduce(stacked))
