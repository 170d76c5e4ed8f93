"""Gradient clipping for weights that may be sharded over several meshes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


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
