"""Layers that read weights of a few bits by onnxruntime's operators, for tracing alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from compress.export.onnx.passes.matmul_nbits import (
    ROUNDING_LEVEL,
    gather_block_quantized,
    matmul_nbits,
    matmul_operands,
    pack_pairs,
)

if TYPE_CHECKING:
    from compress.artifacts.streaming.packed_weight import PackedWeight
    from compress.export.common.packed_weights import DecoderWeights


class PackedLinear(nn.Module):
    """A linear layer as `MatMulNBits`."""

    blocks: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, level: int) -> None:
        super().__init__()
        parts = (weight.packed, weight.scale, weight.zero_point, weight.bits)
        for name, tensor in zip(("blocks", "scale", "zeros"), matmul_operands(*parts), strict=True):
            self.register_buffer(name, tensor)
        self.register_buffer("bias", bias)
        self.bits, self.group_size, self.level = weight.bits, weight.group_size, level

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the product, and the bias added."""
        sizes = (self.bits, self.group_size, self.level)
        product = matmul_nbits(features, self.blocks, self.scale, self.zeros, *sizes)
        return product if self.bias is None else product + self.bias


class PackedTable(nn.Module):
    """An embedding whose rows are dequantized where they are looked up."""

    rows: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        zeros = pack_pairs(weight.zero_point) if weight.bits == 4 else weight.zero_point
        self.register_buffer("rows", weight.packed)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("zeros", zeros)
        self.bits, self.group_size = weight.bits, weight.group_size

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of some ids."""
        if self.bits == 4:
            return gather_block_quantized(self.rows, ids, self.scale, self.zeros, self.group_size)
        parts = (self.rows, self.scale, self.zeros)
        rows, scale, zeros = (nn.functional.embedding(ids, x) for x in parts)
        return (rows.float() - zeros.float()) * scale


def use_packed_layers_(weights: DecoderWeights) -> None:
    """Replace a module's linear layers and tables whose weights are packed, in place."""
    level = ROUNDING_LEVEL if weights.rounds_activations else 0
    for name, layer in [*weights.module.named_modules()]:
        is_table = isinstance(layer, nn.Embedding)
        weight = weights.packed.get((f"{name}.weight", is_table))
        if weight is None or not isinstance(layer, nn.Linear | nn.Embedding):
            continue
        parent, _, own = name.rpartition(".")
        # A table of another class, as Gemma's, may scale what it looks up.
        if is_table and type(layer) is nn.Embedding:
            packed: nn.Module = PackedTable(weight)
        elif is_table:
            continue
        else:
            bias: torch.Tensor | None = getattr(layer, "bias", None)
            packed = PackedLinear(weight, bias, level)
        setattr(weights.module.get_submodule(parent), own, packed)
