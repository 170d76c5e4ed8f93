"""The optimizer, gradient clipping, and the learning rate as a function of the step."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from compress.training.config.training import Training

START_DIVISOR = 25
"""Peak over initial learning rate of `onecycle`, as the default ``div_factor`` of torch's
``OneCycleLR``."""

FUSED_SHARDED = ("adam", "adamw")
"""Optimizers whose fused variant accepts DTensors (torch 2.13; not SGD's and Adagrad's)."""


def build_optimizer(module: torch.nn.Module, training: Training) -> torch.optim.Optimizer:
    """Build the optimizer; weight decay leaves out biases and norms, which are vectors.

    Raises:
        StageFailed: the module has nothing to train, or the optimizer rejects its arguments.
    """
    groups = parameter_groups(module, training)
    with explain_rejected_arguments(training):
        optimizer: torch.optim.Optimizer = optimizer_class(training)(
            groups, **optimizer_arguments(training)
        )
        return optimizer


def parameter_groups(module: torch.nn.Module, training: Training) -> list[dict[str, Any]]:
    """Group the trainable weights: matrices, with weight decay, and vectors, without.

    Raises:
        StageFailed: there are none.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise StageFailed("the model has no weights that require gradients: nothing to train")
    groups = [
        ([p for p in trainable if p.ndim > 1], training.weight_decay_or_default),
        ([p for p in trainable if p.ndim <= 1], 0.0),
    ]
    # torch's foreach and fused steps reject weights of several meshes in one group.
    return [
        {"params": same_mesh, "weight_decay": decay}
        for members, decay in groups
        for same_mesh in group_by_mesh(members)
    ]


def optimizer_class(training: Training) -> Any:
    """Return the class in torch.optim that the settings name."""
    classes = {name.lower(): getattr(torch.optim, name) for name in torch.optim.__all__}
    return classes[training.optimizer]


def optimizer_arguments(training: Training) -> dict[str, Any]:
    """Return the optimizer's arguments besides its weights; `fused` is set where it works."""
    arguments: dict[str, Any] = {"lr": training.peak_learning_rate}
    if training.optimizer == "sgd":
        arguments |= {"momentum": training.momentum, "nesterov": training.nesterov}
    has_fused = "fused" in inspect.signature(optimizer_class(training)).parameters
    is_sharded = training.parallel.sharding_mode is not None or training.parallel.tensor > 1
    is_chosen = {"fused", "foreach", "differentiable"} & training.optimizer_arguments.keys()
    if has_fused and not is_chosen and (not is_sharded or training.optimizer in FUSED_SHARDED):
        arguments["fused"] = True
    return arguments | training.optimizer_arguments


@contextmanager
def explain_rejected_arguments(training: Training) -> Iterator[None]:
    """Name the setting to change where an optimizer rejects its arguments."""
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise StageFailed(
            f"optimizer {training.optimizer} refuses {optimizer_arguments(training)}: {error}; "
            "correct optimizer_arguments"
        ) from error


def learning_rate(training: Training, step: int, steps: int, plateaus: int = 0) -> float:
    """Return the learning rate of a step, counted from 0 over the whole training.

    A function of the step and of the epochs so far, so that no scheduler state need be saved.
    ``onecycle`` follows Smith and Topin, "Super-Convergence" (2018), with cosine ramps and a
    constant momentum; the warm-up of the others is linear.

    Args:
        training: the settings.
        step: the step.
        steps: steps of the whole training.
        plateaus: how often the metric has stopped improving.
    """
    peak, warmup, done = training.peak_learning_rate, training.warmup_share, step / steps
    if done < warmup and training.schedule == "onecycle":
        initial = peak / START_DIVISOR
        return initial + (peak - initial) * (1 - _half_cosine(done / warmup))
    if done < warmup:
        return peak * min(1.0, (step + 1) / (warmup * steps))
    if training.schedule in ("cosine", "onecycle"):
        return peak * _half_cosine((done - warmup) / (1 - warmup))
    falls = plateaus if training.schedule == "plateau" else 0
    if training.schedule == "step":
        falls = step * training.epochs // steps // training.epochs_per_reduction
    return peak * training.schedule_factor**falls


def set_learning_rate_(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group, in place."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _half_cosine(done: float) -> float:
    """Fall from 1 at 0 to 0 at 1."""
    return 0.5 * (1 + math.cos(math.pi * done))


def group_by_mesh(weights: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group weights by the mesh over which they are sharded; unsharded ones form a group."""
    meshes: dict[object, list[torch.Tensor]] = defaultdict(list)
    for weight in weights:
        meshes[weight.device_mesh if isinstance(weight, DTensor) else None].append(weight)
    return list(meshes.values())


@torch.no_grad()
def clip_norm_(
    weights: Iterable[torch.Tensor],
    largest: float,
    global_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Scale all gradients, in place, so that their global norm is at most a limit.

    ``torch.nn.utils.clip_grad_norm_`` raises for gradients on different meshes; here the norm is
    computed for each mesh, and the global norm is the norm of these norms.

    Args:
        weights: this process's weights.
        largest: the limit.
        global_norm: computes the norm over all pipeline stages from that of this one.
    """
    meshes = group_by_mesh(weight for weight in weights if weight.grad is not None)
    norms = [_norm(members) for members in meshes] or [torch.zeros(())]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    total = global_norm(norm) if global_norm else norm
    for members in meshes:
        torch.nn.utils.clip_grads_with_norm_(members, largest, total)


def _norm(weights: list[torch.Tensor]) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
