"""Facts about zeros: their share in each layer, and the size of the compressed weights."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pydantic import JsonValue
    from torch import nn

    from compress.pruning.unstructured.weight_layout import PrunableWeights

DENSE = (
    "Zeros alone make dense kernels no faster and the file no smaller: they are stored and "
    "multiplied like other numbers. They pay where the file is compressed."
)
SPARSE = (
    "Dense kernels are no faster with these zeros. Sparse kernels of CUDA devices take the pattern "
    "2:4 (torch.sparse.to_sparse_semi_structured)."
)


def sparsity_facts(
    before: nn.Module, after: nn.Module, pruned: PrunableWeights, n_of_m: tuple[int, int] | None
) -> dict[str, JsonValue]:
    """Return the share of zeros by layer and in all, and the size of the compressed weights."""
    weights = dict(after.named_parameters())
    shares = {name: _share_of_zeros([weights[name]]) for name in pruned.layouts}
    return {
        "zeros": {
            "by_weight": {name: round(share, 6) for name, share in shares.items()},
            "pruned_weights": round(_share_of_zeros([weights[n] for n in shares]), 6),
            "all_weights": round(_share_of_zeros(list(weights.values())), 6),
        },
        "left": dict(pruned.left),
        "deflated_bytes": {"before": deflated_bytes(before), "after": deflated_bytes(after)},
        "speed": DENSE if n_of_m is None else SPARSE,
    }


def deflated_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's weights and buffers, compressed by zlib as in a zip file."""
    packer, size, seen = zlib.compressobj(), 0, set()
    for tensor in module.state_dict().values():
        if tensor.data_ptr() in seen and tensor.numel():
            continue  # tied weights are stored once
        seen.add(tensor.data_ptr())
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        size += len(packer.compress(flat.numpy().data))
    return size + len(packer.flush())


def _share_of_zeros(weights: list[nn.Parameter]) -> float:
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    return zeros / sum(weight.numel() for weight in weights)
