"""Convolutions and linear layers as matrix products, and the second moments of their inputs.

Letters: G groups, O outputs and I inputs of a group, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from compress.quantization.numeric_debug.activation_tap import sample_rows
from compress.quantization.pt2e.quantizer import LINEAR

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import Node

    InputPairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
    """A layer's input for each batch: the float model's, and the quantized one's."""

aten = torch.ops.aten
UNSUPPORTED = {aten.conv3d.default, aten.conv3d.padding}
"""Operators that `input_rows` does not know, as `F.unfold` takes images."""
ROWS_PER_BATCH = 2048
"""Rows that are used of a batch: memory stays flat however large images are."""


@dataclass
class InputMoments:
    """Second moments of a layer's input x in the float model and y in the quantized one."""

    yy_GII: torch.Tensor  # noqa: N815 - the letters name the axes
    xy_GII: torch.Tensor  # noqa: N815

    @classmethod
    def from_pairs(cls, pairs: InputPairs, layer: Node, kernel: Sequence[int]) -> InputMoments:
        """Average over all rows of a layer's inputs."""
        sums, rows = [torch.zeros(()).double()] * 2, 0
        for float_input, quantized_input in pairs:
            x_GNI, y_GNI = (
                input_rows(layer, values, kernel) for values in (float_input, quantized_input)
            )
            parts = [y_GNI.mT @ y_GNI, x_GNI.mT @ y_GNI]
            sums = [total + part.double() for total, part in zip(sums, parts, strict=True)]
            rows += x_GNI.shape[1]
        return cls(*(total / rows for total in sums))


def weight_matrix(layer: Node, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight as G by O by I."""
    groups = groups_of(layer)
    return weight.reshape(groups, len(weight) // groups, -1)


def groups_of(layer: Node) -> int:
    """Return the number of groups of a layer's channels."""
    return 1 if layer.target is LINEAR else int(_argument(layer, 6, 1))


def input_rows(layer: Node, values: torch.Tensor, kernel: Sequence[int]) -> torch.Tensor:
    """Return a sample of the rows that a layer multiplies its weight with, G by N by I.

    For a convolution these are the patches of its input under the kernel, of the given sizes.
    """
    if layer.target is LINEAR:
        return sample_rows(values.flatten(0, -2)[None], ROWS_PER_BATCH, axis=1)
    axes, kernel = len(kernel), tuple(kernel)
    stride, dilation = (_sizes(_argument(layer, index, 1), axes) for index in (3, 5))
    padding = _argument(layer, 4, 0)
    if isinstance(padding, str):
        total = [d * (k - 1) * (padding == "same") for k, d in zip(kernel, dilation, strict=True)]
        sides = [(t // 2, t - t // 2) for t in total]
    else:
        sides = [(p, p) for p in _sizes(padding, axes)]
    # F.pad takes the last axis first.
    values = F.pad(values, [size for side in reversed(sides) for size in side])
    if axes == 1:  # F.unfold takes images
        values, kernel = values.unsqueeze(2), (1, *kernel)
        stride, dilation = (1, *stride), (1, *dilation)
    patches_BCN = F.unfold(values, kernel, dilation, 0, stride)
    batch, _, positions = patches_BCN.shape
    grouped_BGIN = patches_BCN.view(batch, groups_of(layer), -1, positions)
    return sample_rows(grouped_BGIN.permute(1, 0, 3, 2).flatten(1, 2), ROWS_PER_BATCH, axis=1)


def _sizes(value: Any, axes: int) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, list | tuple) else (value,)
    return sizes * axes if len(sizes) == 1 else sizes


def _argument(layer: Node, index: int, default: Any) -> Any:
    """Return an argument of a convolution: 3 stride, 4 padding, 5 dilation, 6 groups."""
    return layer.args[index] if len(layer.args) > index else default
