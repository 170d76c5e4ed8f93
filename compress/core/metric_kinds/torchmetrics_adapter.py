"""Objects of torchmetrics: made with arguments that fit a model, and merged over processes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from compress.common.errors import PipelineInvalid, Unavailable
from compress.common.requirements import pip_install
from compress.core.objectives.targets import match_to_loss
from compress.data.batch import IGNORED_LABEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

LARGEST_STATE = 2**15
"""Numbers of a metric's state at most that are kept for each group of samples."""


def import_torchmetrics(name: str) -> Any:
    """Import the library for a metric; raise Unavailable if it is not installed."""
    try:
        import torchmetrics
    except ImportError:
        raise Unavailable(f"metric {name!r} needs torchmetrics: {pip_install('metrics')}") from None
    return torchmetrics


def class_at(name: str, path: str) -> Any:
    """Return what the library has at a dotted path; None where there is nothing."""
    found = import_torchmetrics(name)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


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


def ranked_inputs(
    outputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return predictions and targets for a correlation of numbers, and its arguments."""
    outputs, targets = match_to_loss("mse", outputs, targets)
    outputs, targets = (x.reshape(len(x), -1) for x in (outputs, targets))
    count = outputs.shape[1]
    if count == 1:
        outputs, targets = outputs[:, 0], targets[:, 0]
    return outputs, targets, {"num_outputs": count}


def labelled_inputs(
    outputs: torch.Tensor, decisions: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return predictions and targets for a metric of labels, and its arguments.

    Args:
        outputs: scores of classes on axis 1, or binary logits.
        decisions: predicted and true labels, booleans if outputs are binary logits.
    """
    import torch

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
