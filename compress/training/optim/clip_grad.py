"""The norm of a gradient that may lie in shards on several meshes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def group_by_mesh(weights: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the weights that lie whole in each process, and those of each mesh, in their order."""
    meshes: dict[object, list[torch.Tensor]] = defaultdict(list)
    for weight in weights:
        meshes[weight.device_mesh if isinstance(weight, DTensor) else None].append(weight)
    return list(meshes.values())


@torch.no_grad()
def clip_norm_(
    weights: Iterable[torch.Tensor],
    largest: float,
    whole_norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Scale all gradients, in place, so that their common norm is not above a limit.

    ``torch.nn.utils.clip_grad_norm_`` raises where gradients lie on different meshes; here each
    mesh has its norm, and the norm of these is the whole gradient's.

    Args:
        weights: the weights whose gradients this process knows of.
        largest: the limit.
        whole_norm: turns the norm of these into that of all gradients, where others know of more.
    """
    meshes = group_by_mesh(weight for weight in weights if weight.grad is not None)
    norms = [_norm(members) for members in meshes] or [torch.zeros(())]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    total = whole_norm(norm) if whole_norm else norm
    for members in meshes:
        torch.nn.utils.clip_grads_with_norm_(members, largest, total)


def _norm(weights: list[torch.Tensor]) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
