"""The optimizer, and the learning rate as a function of how far training is."""

from __future__ import annotations

import inspect
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from compress.common.errors import StageFailed
from compress.training.optim.clip_grad import group_by_mesh

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.training.config.training import Training

START_DIVISOR = 25
"""The peak over the first learning rate of `onecycle`."""

FUSED_SHARDED = ("adam", "adamw")
"""Optimizers whose fused variant knows sharded tensors (in torch 2.13, not SGD's or Adagrad's)."""


def build_optimizer(module: torch.nn.Module, training: Training) -> torch.optim.Optimizer:
    """Return the optimizer; biases and norms, which are vectors, are not decayed.

    Raises:
        StageFailed: the module has nothing to train, or the optimizer refuses its arguments.
    """
    groups = parameter_groups(module, training)
    with explain_rejected_arguments(training):
        built: torch.optim.Optimizer = optimizer_class(training)(
            groups, **optimizer_arguments(training)
        )
        return built


def parameter_groups(module: torch.nn.Module, training: Training) -> list[dict[str, Any]]:
    """Return the trainable weights: those that are decayed, and the vectors that are not.

    Raises:
        StageFailed: there are none.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise StageFailed("the model has no weights that require gradients: nothing to train")
    groups = [
        ([p for p in trainable if p.ndim > 1], training.decay),
        ([p for p in trainable if p.ndim <= 1], 0.0),
    ]
    # What steps many weights at once refuses those of several meshes in one group.
    return [
        {"params": same, "weight_decay": decay}
        for members, decay in groups
        for same in group_by_mesh(members)
    ]


def optimizer_class(training: Training) -> Any:
    """Return the class of torch.optim that the settings name."""
    classes = {name.lower(): getattr(torch.optim, name) for name in torch.optim.__all__}
    return classes[training.optimizer]


def optimizer_arguments(training: Training) -> dict[str, Any]:
    """Return the optimizer's arguments besides its weights."""
    arguments: dict[str, Any] = {"lr": training.peak_learning_rate}
    if training.optimizer == "sgd":
        arguments |= {"momentum": training.momentum, "nesterov": training.nesterov}
    fuses = "fused" in inspect.signature(optimizer_class(training)).parameters
    spread = training.parallel.sharding_mode is not None or training.parallel.tensor > 1
    asked = {"fused", "foreach", "differentiable"} & training.optimizer_arguments.keys()
    if fuses and not asked and (not spread or training.optimizer in FUSED_SHARDED):
        arguments["fused"] = True
    return arguments | training.optimizer_arguments


@contextmanager
def explain_rejected_arguments(training: Training) -> Iterator[None]:
    """Name the setting to mend where an optimizer refuses its arguments."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise StageFailed(
            f"optimizer {training.optimizer} refuses {optimizer_arguments(training)}: {error}; "
            "mend optimizer_arguments"
        ) from error


def learning_rate(training: Training, step: int, steps: int, plateaus: int = 0) -> float:
    """Return the learning rate of a step, counted from 0 over the whole training.

    A function of the step and of the epochs so far, so that resuming needs no scheduler's state.
    ``onecycle`` follows Smith and Topin, "Super-Convergence" (2018), with cosine ramps and a
    constant momentum; the others rise linearly, where they are to rise.

    Args:
        training: the settings.
        step: the step.
        steps: steps of the whole training.
        plateaus: how often the metric has stopped to gain.
    """
    peak, rising, done = training.peak_learning_rate, training.warmup_share, step / steps
    if done < rising and training.schedule == "onecycle":
        first = peak / START_DIVISOR
        return first + (peak - first) * (1 - _falling(done / rising))
    if done < rising:
        return peak * min(1.0, (step + 1) / (rising * steps))
    if training.schedule in ("cosine", "onecycle"):
        return peak * _falling((done - rising) / (1 - rising))
    falls = plateaus if training.schedule == "plateau" else 0
    if training.schedule == "step":
        falls = step * training.epochs // steps // training.epochs_per_fall
    return peak * training.schedule_factor**falls


def set_learning_rate_(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group, in place."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _falling(done: float) -> float:
    """Return half a cosine, from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * done))
