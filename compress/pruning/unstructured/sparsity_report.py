"""What zeros came to: their share in each layer, and what compressing the weights then saves."""

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


def facts_of_zeros(
    before: nn.Module, after: nn.Module, found: PrunableWeights, n_of_m: tuple[int, int] | None
) -> dict[str, JsonValue]:
    """Return the share of zeros by layer and in all, and the measured size of compressed weights.

    Args:
        before: the module as it came in.
        after: the module with zeros.
        found: where zeros were set, and what was left alone and why.
        n_of_m: the pattern, where there is one.
    """
    weights = dict(after.named_parameters())
    shares = {name: _share_of_zeros([weights[name]]) for name in found.layouts}
    return {
        "zeros": {
            "by_weight": {name: round(share, 6) for name, share in shares.items()},
            "pruned_weights": round(_share_of_zeros([weights[n] for n in shares]), 6),
            "all_weights": round(_share_of_zeros(list(weights.values())), 6),
        },
        "left": dict(found.left),
        "deflated_bytes": {"before": deflated_bytes(before), "after": deflated_bytes(after)},
        "speed": DENSE if n_of_m is None else SPARSE,
    }


def deflated_bytes(module: nn.Module) -> int:
    """Return how many bytes a module's weights and buffers have once a zip file holds them."""
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
