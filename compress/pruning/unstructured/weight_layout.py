"""Find the weights that can be pruned, and as which matrices layers read them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import nn

from compress.data.batch import Batch
from compress.pruning.allocation.ranking import names_matching
from compress.pruning.depth.block_search import all_blocks
from compress.pruning.importance.layer_calls import record_layer_calls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import JsonValue

    from compress.pruning.importance.layer_calls import LayerCall


UNOBSERVED = (nn.MultiheadAttention, nn.RNNBase, nn.modules.conv._ConvTransposeNd)
"""Layers of torch with matrices for weights whose calls :mod:`layer_calls` does not observe."""


@dataclass(frozen=True)
class WeightLayout:
    """How a layer reads its weight as one matrix for each of its groups."""

    read_axis: int
    groups: int
    channels: int
    """Channels that each group reads."""
    kernel: int
    """Positions of a convolution's window; 1 for a linear layer."""

    @classmethod
    def from_call(cls, call: LayerCall) -> WeightLayout:
        """Build the layout from an observed call."""
        kernel = prod(call.kernel)
        return cls(call.read_axis, call.groups, call.columns // kernel, kernel)

    def columns(self, matrix_gxi: torch.Tensor) -> torch.Tensor:
        """Reorder columns from (channel, window position) to (window position, channel).

        Then channels of one position are neighbours, as sparse kernels require.
        """
        by_channel = matrix_gxi.reshape(*matrix_gxi.shape[:-1], self.channels, self.kernel)
        return by_channel.transpose(-1, -2).reshape(matrix_gxi.shape)

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """Reshape a weight to `(groups, outputs, columns)`, channels of one position adjacent."""
        rows = weight.t() if self.read_axis == 0 else weight
        return self.columns(rows.reshape(self.groups, -1, self.channels * self.kernel))

    def weight(self, matrix_goi: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Undo ``matrix``: return a matrix in the shape of its weight."""
        by_position = matrix_goi.reshape(*matrix_goi.shape[:-1], self.kernel, self.channels)
        rows = by_position.transpose(-1, -2)
        if self.read_axis == 0:
            return rows.reshape(shape[1], shape[0]).t()
        return rows.reshape(shape)


@dataclass(frozen=True)
class PrunableWeights:
    """The weights that can be set to zero, and why others cannot."""

    layouts: Mapping[str, WeightLayout | None]
    """Tensor in the order of its first use → its layout, or None if no call was observed."""
    left: Mapping[str, str]
    """Tensor that is not pruned → why."""

    def with_known_layout(self, n_of_m: tuple[int, int] | None = None) -> PrunableWeights:
        """Keep the weights with a layout, and with a multiple of ``m`` channels."""
        left = dict(self.left)
        for name, layout in self.layouts.items():
            if layout is None:
                left[name] = "what it is multiplied with cannot be seen; use method: l1 or random"
            elif n_of_m and layout.channels % n_of_m[1]:
                left[name] = f"it reads {layout.channels} channels, no multiple of {n_of_m[1]}"
        return self.without(left)

    def without(self, left: Mapping[str, str]) -> PrunableWeights:
        """Return the same without some weights → why these are not pruned."""
        layouts = {name: layout for name, layout in self.layouts.items() if name not in left}
        return PrunableWeights(layouts, {**self.left, **left})


def prunable_weights(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> PrunableWeights:
    """Find the matrices and kernels of a module in eval mode, without embeddings and vectors.

    ``include`` and ``exclude`` are patterns of tensors, or of modules around them.
    """
    calls, elsewhere = record_layer_calls(module, Batch(tuple(inputs), None), str(inputs[0].device))
    layout_of: dict[str, WeightLayout] = {}
    for call in calls:
        layout_of.setdefault(call.weight, WeightLayout.from_call(call))
    unobserved = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, part in module.named_modules()
        if isinstance(part, UNOBSERVED)
        for name, _ in part.named_parameters()
    ]
    shapes = {name: p.dim() for name, p in module.named_parameters() if p.is_floating_point()}
    matrices = [name for name in (*layout_of, *unobserved) if shapes.get(name, 0) > 1]
    chosen = _matching(list(shapes), include, "include") if include else set(matrices)
    chosen -= _matching(list(shapes), exclude, "exclude")
    layouts, left = {}, {}
    for name in dict.fromkeys((*matrices, *sorted(chosen))):
        if name not in chosen:
            left[name] = "excluded"
        elif shapes[name] < 2:
            left[name] = "it is a vector"
        elif name in elsewhere and not include:
            left[name] = "it is used otherwise than by a layer, too"
        else:
            layouts[name] = layout_of.get(name)
    return PrunableWeights(layouts, left)


def group_by_block(module: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Group tensors of one repeated block; others stay alone. The order is kept."""
    blocks = [block.name for block in all_blocks(module)]
    groups: dict[str, list[str]] = {}
    for name in names:
        around = next((block for block in blocks if name.startswith(f"{block}.")), name)
        groups.setdefault(around, []).append(name)
    return list(groups.values())


def _matching(names: Sequence[str], patterns: Sequence[str], setting: str) -> set[str]:
    """Return the tensors whose names, or modules around them, patterns match."""
    parts_of = [name.split(".") for name in names]
    known = {".".join(parts[:end]) for parts in parts_of for end in range(1, len(parts) + 1)}
    setting = f"prune_weights.{setting}"
    return set(names) & set(names_matching(sorted(known), patterns, setting, "weight or module"))


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
