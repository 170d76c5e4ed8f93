"""Operators that XNNPACK or ExecuTorch's portable kernels lack, written as others."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch._decomp import get_decompositions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

aten = torch.ops.aten


def replacements() -> dict[Any, Any]:
    """Return a table for `ExportedProgram.run_decompositions`: operator → function."""
    return {
        aten.scaled_dot_product_attention.default: attention,
        aten.gelu.default: gelu,
        aten.instance_norm.default: instance_norm,
        aten.adaptive_max_pool2d.default: adaptive_max_pool2d,
        aten.unsqueeze.default: unsqueeze,
        **get_decompositions([aten.tril_indices, aten.triu_indices]),
    }


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Write attention as two products and a softmax, which have kernels of XNNPACK.

    torch's own decomposition copies its inputs for a product of more than three axes, and would
    leave views to ExecuTorch that fit the strides of the fused kernel alone.
    """
    if query.dim() != 4 or key.shape[:2] != query.shape[:2] or enable_gqa:
        return NotImplemented
    rows, keys, values = (x.flatten(0, 1) for x in (query, key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.bmm(rows * factor, keys.transpose(1, 2))
    if is_causal:
        places = [torch.arange(x.shape[-2], device=query.device) for x in (query, key)]
        attn_mask = places[1] <= places[0][:, None]
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        scores = scores.view(*query.shape[:3], key.shape[2])
        if attn_mask.dtype == torch.bool:
            scores = torch.where(attn_mask, scores, -math.inf)
        else:
            scores = scores + attn_mask
        # Rows of which a mask leaves nothing give zeros, as torch's kernels do.
        is_empty = (scores == -math.inf).all(-1, keepdim=True)
        weights = torch.where(is_empty, 0.0, torch.softmax(scores, -1)).flatten(0, 1)
    mixed = torch.bmm(weights, values)
    return mixed.reshape(*query.shape[:3], value.shape[-1])


def gelu(x: Tensor, *, approximate: str = "none") -> Any:
    """Write the approximation by tanh out: XNNPACK (executorch 1.5.1) computes the exact GELU."""
    if approximate != "tanh":
        return NotImplemented
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return 0.5 * x * (1 + torch.tanh(inner))


def instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """Write normalisation by a sample's own statistics as operators that XNNPACK has kernels for.

    The portable kernel (executorch 1.5.1) gives infinite answers for channels of equal values.
    """
    if not use_input_stats:
        return NotImplemented
    positions = [*range(2, x.dim())]
    centred = x - x.mean(positions, keepdim=True)
    variance = (centred * centred).mean(positions, keepdim=True)
    normalized = centred * torch.rsqrt(variance + eps)
    shape = (1, -1, *[1] * len(positions))
    if weight is not None:
        normalized = normalized * weight.view(shape)
    return normalized if bias is None else normalized + bias.view(shape)


def adaptive_max_pool2d(x: Tensor, output_size: Sequence[int]) -> Any:
    """Write it as max pooling, where all windows have the same size."""
    sizes = x.shape[-2:]
    if not all(isinstance(size, int) for size in sizes):
        return NotImplemented
    if any(size % out for size, out in zip(sizes, output_size, strict=True)):
        return NotImplemented
    window = [size // out for size, out in zip(sizes, output_size, strict=True)]
    return aten.max_pool2d_with_indices.default(x, window, window)


def unsqueeze(x: Tensor, dim: int) -> Any:
    """Write it as a view where a last axis is added to several that have no fixed size.

    XNNPACK's partitioner (executorch 1.5.1) takes it, and its preprocessing fails.
    """
    dynamic = sum(not isinstance(size, int) for size in x.shape)
    if dynamic < 2 or dim not in (-1, x.dim()):
        return NotImplemented
    return x.view(*x.shape, 1)
