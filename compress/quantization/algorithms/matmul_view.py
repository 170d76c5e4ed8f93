"""Convolutions and linear layers as products of a matrix with rows, and the sums that fit them.

Letters: G groups, O outputs and I inputs of a group, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from compress.quantization.numeric_debug.activation_tap import some_rows
from compress.quantization.pt2e.quantizer import LINEAR

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import Node

    Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
    """Batches of what a layer reads: as floats, and with all before it rounded."""

aten = torch.ops.aten
ROWS_OF_A_BATCH = 2048
"""Enough for each layer's sums, and memory stays flat however large images are."""


@dataclass
class Moments:
    """Means over rows of what a layer reads: x as floats, y with all before the layer rounded."""

    yy_GII: torch.Tensor  # noqa: N815 - the letters name the axes
    xy_GII: torch.Tensor  # noqa: N815

    @classmethod
    def of(cls, pairs: Pairs, layer: Node, kernel: Sequence[int]) -> Moments:
        """Add up batches of inputs, floats and rounded ones."""
        sums, rows = [torch.zeros(()).double()] * 2, 0
        for floats, rounded in pairs:
            x_GNI, y_GNI = (rows_of(layer, values, kernel) for values in (floats, rounded))
            parts = [y_GNI.mT @ y_GNI, x_GNI.mT @ y_GNI]
            sums = [total + part.double() for total, part in zip(sums, parts, strict=True)]
            rows += x_GNI.shape[1]
        return cls(*(total / rows for total in sums))


def is_product(layer: Node) -> bool:
    """Whether rows can be made of what a layer reads."""
    return layer.target not in (aten.conv3d.default, aten.conv3d.padding)


def rows_of(layer: Node, values: torch.Tensor, kernel: Sequence[int]) -> torch.Tensor:
    """Return what a layer multiplies its weight with, G by N by I; some rows of many.

    Args:
        layer: a convolution or linear layer.
        values: what it reads.
        kernel: sizes of a convolution's kernel.
    """
    linear = layer.target is LINEAR
    rows_GNI = values.flatten(0, -2)[None] if linear else _patches(layer, values, tuple(kernel))
    return some_rows(rows_GNI, ROWS_OF_A_BATCH, axis=1)


def matrix(layer: Node, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as G by O by I."""
    groups = groups_of(layer)
    return weight.reshape(groups, len(weight) // groups, -1)


def groups_of(layer: Node) -> int:
    """Return into how many groups a layer's channels fall."""
    return 1 if layer.target is LINEAR else int(_argument(layer, 6, 1))


def _patches(layer: Node, values: torch.Tensor, kernel: tuple[int, ...]) -> torch.Tensor:
    axes = len(kernel)
    stride, dilation = (_sizes(_argument(layer, place, 1), axes) for place in (3, 5))
    values = F.pad(values, _padding(_argument(layer, 4, 0), kernel, dilation))
    if axes == 1:
        values, kernel = values.unsqueeze(2), (1, *kernel)
        stride, dilation = (1, *stride), (1, *dilation)
    patches_BCN = F.unfold(values, kernel, dilation, 0, stride)
    batch, _, places = patches_BCN.shape
    grouped_BGIN = patches_BCN.view(batch, groups_of(layer), -1, places)
    return grouped_BGIN.permute(1, 0, 3, 2).flatten(1, 2)


def _padding(given: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    """Return what is added before and after each axis, the last axis first."""
    if isinstance(given, str):
        total = [d * (k - 1) * (given == "same") for k, d in zip(kernel, dilation, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in _sizes(given, len(kernel))]
    return [size for side in reversed(sides) for size in side]


def _sizes(given: Any, axes: int) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, list | tuple) else (given,)
    return sizes * axes if len(sizes) == 1 else sizes


def _argument(layer: Node, place: int, default: Any) -> Any:
    """Return an argument of a convolution: 3 stride, 4 padding, 5 dilation, 6 groups."""
    return layer.args[place] if len(layer.args) > place else default
