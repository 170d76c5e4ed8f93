"""Metrics by torchmetrics, and the user's own: made for a model, and merged over processes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, ClassVar

from compress.common.errors import PipelineInvalid, Unavailable
from compress.common.forward import first_output, output_argument
from compress.common.requirements import pip_install
from compress.core.metrics.builtin import label_decisions
from compress.core.metrics.metric import (
    JACKKNIFE_GROUPS,
    FunctionMeter,
    Metric,
    MetricMeter,
    one_number,
)
from compress.core.objectives.loss import loss_kind
from compress.core.objectives.task import need_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from compress.common.forward import Outputs
    from compress.data.targets import Targets


class Torchmetrics(Metric):
    """A class of the library by its name: ``torchmetrics.classification.BinaryF1Score``."""

    pattern, form = "^torchmetrics[.]", "torchmetrics.…"
    higher: ClassVar[bool | None] = None
    adds_states = True
    path: ClassVar[str] = ""
    """The class's place inside torchmetrics; by default what follows in the name."""

    def declared_direction(self) -> bool | None:
        """Return whether larger is better by the library's class, or the user's."""
        return getattr(self.implementation(), "higher_is_better", None)

    def implementation(self, inferred: Mapping[str, Any] | None = None) -> Any:
        """Make the object of torchmetrics; `inferred` are arguments that follow from the data."""
        target = import_torchmetrics(self.name)
        for part in (self.path or self.name.partition(".")[2]).split("."):
            target = getattr(target, part, None)
        return create(self.name, target, {**(inferred or {}), **dict(self.arguments)})

    def compared(
        self, outputs: Outputs, targets: Targets
    ) -> tuple[Any, Targets, dict[str, Any] | None]:
        """Return what the object is updated with, and arguments of its class that fit it."""
        if self.takes_all_outputs:
            return output_argument(outputs, self.outputs), targets, None
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

    pattern, form = ":", "module:callable"
    # The updates of the user's own class may depend on how samples are divided.
    adds_states = False
    takes_all_outputs = True

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

    def meter(self) -> MetricMeter:
        """Return what updates the object, or keeps the outputs for the function."""
        own = self.implementation()
        if hasattr(own, "metric_state"):
            return TorchmetricsMeter(self, own)
        return FunctionMeter(self, own, dict(self.arguments))


class _LabelMetric(Torchmetrics):
    # A mean over classes, by a class of torchmetrics whose arguments follow from the data.
    pattern = form = ""
    higher = True
    is_fraction = in_points = reads_loss = True
    labels = "any"

    def meter(self) -> MetricMeter:
        return TorchmetricsMeter(self)  # makes the object when the first batch shows its arguments

    def check_settings(self) -> None:
        import_torchmetrics(self.name)

    def compared(
        self, outputs: Outputs, targets: Targets
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        import torch

        from compress.data.batch import IGNORED_LABEL

        targets = need_tensor(f"metric {self.name}", targets)
        first, targets = self.loss.align(first_output(outputs), targets)
        labels, known = label_decisions(self.name, first, targets, self.loss)
        settings: dict[str, Any] = {"average": "macro", "ignore_index": IGNORED_LABEL}
        if labels.dtype != torch.bool:
            settings |= {"task": "multiclass", "num_classes": first.shape[1]}
            return labels.flatten(), known.flatten().long(), settings
        if first.dim() > 1 and first.shape[1] > 1:
            settings |= {"task": "multilabel", "num_labels": first.shape[1]}
            return labels.long(), known.long(), settings
        binary = {"task": "binary", "ignore_index": IGNORED_LABEL}
        return labels.flatten().long(), known.flatten().long(), binary


class F1(_LabelMetric):
    """The harmonic mean of precision and recall."""

    path = "F1Score"


class MeanIoU(_LabelMetric):
    """Intersection over union of the pixels of each class."""

    path = "JaccardIndex"


class Spearman(Metric):
    """The correlation of ranks of numbers; of several outputs, the mean of theirs."""

    def meter(self) -> FunctionMeter:
        """Return what keeps the numbers: a rank depends on all of them."""
        return FunctionMeter(self, self._correlation, jackknife_groups=JACKKNIFE_GROUPS)

    def _correlation(self, outputs: torch.Tensor, targets: Targets) -> torch.Tensor:
        from torchmetrics.functional.regression import spearman_corrcoef

        targets = need_tensor(f"metric {self.name}", targets)
        pair = loss_kind("mse").match(outputs, targets)
        return spearman_corrcoef(*(x.reshape(len(x), -1) for x in pair)).mean()

    def check_settings(self) -> None:
        """Raise Unavailable if the library is not installed."""
        import_torchmetrics(self.name)


class TorchmetricsMeter(MetricMeter):
    """Updates an object of torchmetrics."""

    metric: Torchmetrics

    def __init__(self, metric: Torchmetrics, own: Any = None) -> None:
        super().__init__(metric)
        self.own = own
        self.inferred: dict[str, Any] | None = None

    def _add(self, outputs: Outputs, targets: Targets, group: int | None) -> None:
        compared, targets, self.inferred = self.metric.compared(outputs, targets)
        # The number of classes is that of the first batch's outputs.
        self.own = self.own or self.metric.implementation(self.inferred)
        before = None if group is None else summed_state(self.own)
        self._call(self.own.update, compared, targets)
        if before is not None and (now := summed_state(self.own)) is not None:
            self._add_group(group, now - before)

    def _compute_of(self, sums: torch.Tensor) -> float:
        start = 0
        for module in metrics_in(self.own):
            for name in module._reductions:
                value = getattr(module, name)
                part = sums[start : start + value.numel()].reshape(value.shape).to(value.dtype)
                setattr(module, name, part)
                start += value.numel()
            module._computed = None
        return self.compute()

    def state(self) -> Any:
        """Return the object's state, with the arguments that it was made with."""
        if self.own is None or not self.own.update_called:
            return None
        return self.inferred, [module.metric_state for module in metrics_in(self.own)]

    def add_shares_(self, states: Sequence[Any]) -> None:
        """Merge the states of all processes."""
        import torch

        known = [state for state in states if state is not None]
        if not known:
            return
        self.own = self.own or self.metric.implementation(known[0][0])
        # As `Metric.sync` does. But that exchanges tensor by tensor, so that processes with lists
        # of different lengths wait for ever, and counts the initial state of one without samples;
        # and `Metric.merge_state` refuses some metrics.
        shares = (state for _, state in known)
        for module, *parts in zip(metrics_in(self.own), *shares, strict=True):
            module._update_count = module._update_count or 1  # this process may have no samples
            for name, reduce in module._reductions.items():
                values = [part[name] for part in parts]
                if isinstance(values[0], list):
                    setattr(module, name, [tensor for value in values for tensor in value])
                else:
                    stacked = torch.stack(values)
                    setattr(module, name, stacked if reduce is None else reduce(stacked))

    def _value(self, added: Any) -> float:
        return one_number(self.metric.name, self._call(self.own.compute))


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


def metrics_in(metric: Any) -> list[Any]:
    """Return an object of torchmetrics and those that it is computed from."""
    return [module for module in metric.modules() if hasattr(module, "metric_state")]


def summed_state(metric: Any) -> torch.Tensor | None:
    """Return the state of an object of torchmetrics as float64 numbers, if all of it is sums."""
    import torch
    from torchmetrics.utilities import dim_zero_sum

    values: list[torch.Tensor] = []
    for module in metrics_in(metric):
        for name, reduce in module._reductions.items():
            if reduce is not dim_zero_sum:
                return None
            values.append(getattr(module, name).double().flatten())
    # A larger state is not kept for each group of samples.
    return torch.cat(values) if 0 < sum(map(len, values)) <= 2**15 else None
