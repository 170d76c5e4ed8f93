"""The norm of a gradient that may lie in shards on several meshes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable


@torch.no_grad()
def clip_norm_(weights: Iterable[torch.Tensor], largest: float) -> None:
    """Scale all gradients, in place, so that their common norm is not above a limit.

    ``torch.nn.utils.clip_grad_norm_`` raises where gradients lie on different meshes; here each
    mesh has its norm, and the norm of these is the whole gradient's.
    """
    meshes: dict[object, list[torch.Tensor]] = defaultdict(list)
    for weight in weights:
        if weight.grad is not None:
            mesh = weight.grad.device_mesh if isinstance(weight.grad, DTensor) else None
            meshes[mesh].append(weight)
    norms = [_norm(members) for members in meshes.values()]
    if not norms:
        return
    total = torch.linalg.vector_norm(torch.stack(norms))
    for members in meshes.values():
        torch.nn.utils.clip_grads_with_norm_(members, largest, total)


def _norm(weights: list[torch.Tensor]) -> torch.Tensor:
    norm = torch.nn.utils.get_total_norm([w.grad for w in weights if w.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
