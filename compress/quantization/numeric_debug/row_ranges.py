"""Ranges chosen at run time for each row of a batch, as for a row that is served alone."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers choose_qparams
from torch import fx
from torch.ao.quantization.utils import determine_qparams

DECOMPOSED = torch.ops.quantized_decomposed
CHOOSE = DECOMPOSED.choose_qparams.tensor


def has_call_ranges(graph: fx.GraphModule) -> bool:
    """Whether a graph's outputs for a row depend on the other rows of the call."""
    return any(node.target is CHOOSE for node in graph.graph.nodes)


def choose_ranges_by_row_(graph: fx.GraphModule) -> bool:
    """Let a graph that takes any number of rows choose a range for each, in place.

    Rows of a batch then have the outputs that each has alone, up to rounding.

    Returns:
        False, with the graph as it was, where a tensor's first axis is not that of the rows, or
        scales are read by other operators than those that quantize and dequantize.
    """
    rows = next(iter(graph.graph.find_nodes(op="placeholder"))).meta["val"].shape[0]
    by_row: dict[Any, Any] = {
        DECOMPOSED.quantize_per_tensor.tensor: _quantize,
        DECOMPOSED.dequantize_per_tensor.tensor: _dequantize,
    }
    readers: list[fx.Node] = []
    chosen = graph.graph.find_nodes(op="call_function", target=CHOOSE)
    for choose in chosen:
        value = choose.args[0].meta.get("val")
        if not isinstance(rows, torch.SymInt) or value is None or not value.dim():
            return False
        if str(value.shape[0]) != str(rows):
            return False
        for part in choose.users:
            readers += part.users
            if part.target is not operator.getitem:
                return False
    if any(reader.target not in by_row for reader in readers):
        return False
    for choose in chosen:
        choose.target = _choose
    for reader in {*readers}:
        reader.target = by_row[reader.target]
    graph.recompile()
    return True


def _choose(
    x: torch.Tensor, least: int, most: int, smallest: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and zero point of each row, in the shape [rows, 1, …]."""
    low_N, high_N = x.flatten(1).aminmax(dim=1)
    scale_N, zero_N = determine_qparams(
        low_N, high_N, least, most, dtype, torch.tensor([smallest]), has_customized_qrange=False
    )
    shape = (len(x), *[1] * (x.dim() - 1))
    return scale_N.reshape(shape), zero_N.reshape(shape)


# As quantize_per_tensor and dequantize_per_tensor compute, which take a single scale only.


def _quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    least: int,
    most: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    integers = torch.round(x * (1.0 / scale).to(x.dtype)) + zero
    return integers.clamp(least, most).to(dtype)


def _dequantize(
    integers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *_limits: Any, **_out: Any
) -> torch.Tensor:
    return (integers.to(torch.float32) - zero) * scale.float()
