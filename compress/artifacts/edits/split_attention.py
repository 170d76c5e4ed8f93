"""Multi-head attention with prunable heads: ``nn.MultiheadAttention`` as separate linear layers."""

# torch's own module packs the projections of queries, keys and values in one tensor, and accepts no
# inner width but ``embed_dim``, so that no head can be removed.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class SplitMultiheadAttention(nn.Module):
    """Replacement of ``nn.MultiheadAttention``, the same in use, with one layer per projection."""

    in_proj_weight = None
    in_proj_bias = None
    """None keeps torch's transformer layers off the fused path, which skips this module."""
    _qkv_same_embed_dim = False

    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear

    def __init__(self, old: nn.MultiheadAttention) -> None:
        """Reuse the output projection of a module, and copy its packed input projections."""
        super().__init__()
        self.head_dim = old.head_dim
        self.batch_first = old.batch_first
        self.dropout = old.dropout
        names = ("q_proj", "k_proj", "v_proj")
        # Packed where queries, keys and values have the same width; biases always are.
        packed, bias = old.in_proj_weight, old.in_proj_bias
        weights = [getattr(old, f"{n}_weight") for n in names] if packed is None else _parts(packed)
        biases = [None] * len(names) if bias is None else _parts(bias)
        for name, weight, own_bias in zip(names, weights, biases, strict=True):
            self.add_module(name, _linear(weight, own_bias))
        self.out_proj = _linear(old.out_proj.weight, old.out_proj.bias)
        self.train(old.training)

    @property
    def num_heads(self) -> int:
        """Number of heads, which follows from the weights: pruning changes it."""
        return int(self.q_proj.weight.shape[0] // self.head_dim)

    @property
    def embed_dim(self) -> int:
        """Width of the input queries."""
        return int(self.q_proj.weight.shape[1])

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attended values and, if needed, the weights; see ``nn.MultiheadAttention``."""
        is_single = query.dim() == 2
        if is_single:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        # [batch, heads, length, head_dim]
        q, k, v = (
            project(x).view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
            for project, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, which is missing")
        hint = is_causal and key_padding_mask is None and not need_weights
        mask = None if hint else _merge_masks(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-1, -2)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout, self.training)
            attended = weights @ v
        else:  # the fused kernel never has the weights in memory
            attended = F.scaled_dot_product_attention(q, k, v, mask, dropout, hint)
        output = self.out_proj(attended.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if is_single:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights


def split_attention_(module: nn.Module, names: Iterable[str]) -> None:
    """Replace torch's attention, wherever it occurs, in place; raise TypeError for others."""
    for name in names:
        old = module.get_submodule(name)
        if old is module or not isinstance(old, nn.MultiheadAttention):
            raise TypeError(f"{name!r} is {type(old).__name__}, expected MultiheadAttention")
        new = SplitMultiheadAttention(old)
        for holder in list(module.modules()):
            for key, child in holder._modules.items():
                if child is old:
                    holder._modules[key] = new
    for part in module.modules():
        inside = (type(inner) is SplitMultiheadAttention for inner in part.modules())
        if isinstance(part, nn.TransformerEncoder) and any(inside):
            part.use_nested_tensor = False  # nested tensors need torch's own attention


def is_splittable(layer: nn.Module) -> bool:
    """Whether a module is torch's own attention, with options that the replacement has too."""
    return (
        type(layer) is nn.MultiheadAttention
        and layer.bias_k is None
        and not layer.add_zero_attn
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )


def _parts(packed: torch.Tensor) -> list[Any]:
    return [nn.Parameter(p.detach().clone(), packed.requires_grad) for p in packed.chunk(3)]


def _linear(weight: Any, bias: Any) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer._parameters |= {"weight": weight, "bias": bias}
    return layer


def _merge_masks(
    attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, query: torch.Tensor
) -> torch.Tensor | None:
    """Merge both masks into one that is added to the scores (batch, heads, queries, keys)."""
    masks = []
    if attn_mask is not None:
        shape = attn_mask.shape
        per_head = attn_mask.view(len(query), -1, *shape[1:]) if len(shape) == 3 else attn_mask
        masks.append(_additive(per_head, query))
    if key_padding_mask is not None:
        masks.append(_additive(key_padding_mask, query)[:, None, None])
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] + masks[1]


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, float("-inf"))
