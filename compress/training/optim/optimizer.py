"""The optimizer and gradient clipping."""

from __future__ import annotations

import inspect
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from compress.training.config.training import Training

FUSED_SHARDED = ("adam", "adamw")
"""Optimizers whose fused variant accepts DTensors (torch 2.13; not SGD's and Adagrad's)."""


def build_optimizer(module: torch.nn.Module, training: Training) -> torch.optim.Optimizer:
    """Build the optimizer; weight decay leaves out biases and norms, which are vectors."""
    groups = parameter_groups(module, training)
    with explain_rejected_arguments(training):
        optimizer: torch.optim.Optimizer = optimizer_class(training)(
            groups, **optimizer_arguments(training)
        )
    if training.precision == "bf16-true" and training.compile == "none":
        # torchao compiles each step, which needs a C++ compiler and takes minutes.
        step = torch.compiler.set_stance("force_eager")(optimizer.step)
        optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def parameter_groups(module: torch.nn.Module, training: Training) -> list[dict[str, Any]]:
    """Group the trainable weights: matrices, with weight decay, and vectors, without."""
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
    """Return the class that the settings name: torch.optim's, or torchao's that rounds."""
    if training.precision == "bf16-true":
        from torchao.optim import _AdamW

        return _AdamW
    classes = {name.lower(): getattr(torch.optim, name) for name in torch.optim.__all__}
    return classes[training.optimizer]


def optimizer_arguments(training: Training) -> dict[str, Any]:
    """Return the optimizer's arguments besides its weights; `fused` is set where it works."""
    arguments: dict[str, Any] = {"lr": training.peak_learning_rate}
    if training.precision == "bf16-true":
        arguments["bf16_stochastic_round"] = True
    if training.optimizer == "sgd":
        arguments |= {"momentum": training.momentum_or_default, "nesterov": training.nesterov}
    has_fused = "fused" in inspect.signature(optimizer_class(training)).parameters
    is_sharded = training.parallel.sharding_mode is not None or training.parallel.tensor > 1
    # torch refuses `fused` beside either of the other two.
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


def group_by_mesh(weights: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group weights by the mesh over which they are sharded; unsharded ones form a group."""
    meshes: dict[object, list[torch.Tensor]] = defaultdict(list)
    for weight in weights:
        meshes[weight.device_mesh if isinstance(weight, DTensor) else None].append(weight)
    return list(meshes.values())


@torch.no_grad()
def clip_norm_(
    weights: Iterable[torch.Tensor],
    largest: float | None,
    global_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Scale all gradients, in place, so that their global norm is at most a limit, if there is one.

    Returns the norm from before.
    """
    # torch.nn.utils.clip_grad_norm_ raises for gradients on different meshes. Here the norm is
    # computed for each mesh, and the global norm is the norm of these norms.
    meshes = group_by_mesh(weight for weight in weights if weight.grad is not None)
    norms = []
    for members in meshes:
        norm = torch.nn.utils.get_total_norm([w.grad for w in members if w.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    norm = torch.linalg.vector_norm(torch.stack(norms or [torch.zeros(())]))
    total = global_norm(norm) if global_norm else norm  # over all pipeline stages
    if largest is not None:
        for members in meshes:
            torch.nn.utils.clip_grads_with_norm_(members, largest, total)
    return total
