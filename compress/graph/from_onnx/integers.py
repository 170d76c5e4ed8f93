"""ONNX operators that quantize, dequantize and compute with integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compress.graph.from_onnx.elementwise import DTYPES
from compress.graph.from_onnx.layers import convolve
from compress.graph.from_onnx.registry import Node, Unsupported, operator


def _by_axis(value: Tensor, x: Tensor, axis: int, block: int = 0) -> Tensor:
    if value.ndim == 0 or value.numel() == 1:
        return value.reshape(())
    if block:
        value = value.repeat_interleave(block, axis)
        return value.narrow(axis, 0, x.shape[axis])
    return value.reshape((-1,) + (1,) * (x.ndim - 1 - axis % x.ndim))


RANGES = {
    torch.uint8: (0, 255),
    torch.int8: (-128, 127),
    torch.uint16: (0, 65535),
    torch.int16: (-32768, 32767),
}


@operator("QuantizeLinear")
def _quantize(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    kind = DTYPES[node.get("output_dtype") or 2]
    zero = torch.zeros((), dtype=kind) if zero is None else zero
    if zero.dtype not in RANGES:
        raise Unsupported(f"to {zero.dtype}")
    low, high = RANGES[zero.dtype]
    scale = _by_axis(scale, x, axis, block).to(x.dtype)
    shift = _by_axis(zero.int().float(), x, axis, block)  # torch converts no uint16 to floats
    y = (torch.round(x / scale).float() + shift).clamp(low, high)
    return y.to(torch.int32).to(zero.dtype)


@operator("DequantizeLinear")
def _dequantize(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    if x.dtype not in (*RANGES, torch.int32):
        raise Unsupported(f"from {x.dtype}")
    shift = 0 if zero is None else _by_axis(zero.int(), x, axis, block)
    return (x.int() - shift).to(scale.dtype) * _by_axis(scale, x, axis, block)


@operator("QLinearMatMul")
def _integer_matmul(node: Node, *values: Tensor) -> Tensor:
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = values
    last = Node(node.operator, node.name, (), (), node.opset, {"axis": -1})
    rows = Node(node.operator, node.name, (), (), node.opset, {"axis": -2})
    x = _dequantize(rows, a, a_scale, a_zero)
    return _quantize(last, x @ _dequantize(last, b, b_scale, b_zero), scale, zero)


@operator("QLinearConv")
def _integer_convolve(node: Node, *values: Tensor) -> Tensor:
    x, x_scale, x_zero, w, w_scale, w_zero, scale, zero, *biases = values
    first = Node(node.operator, node.name, (), (), node.opset, {"axis": 0})
    weight = _dequantize(first, w, w_scale, w_zero)
    x = _dequantize(node, x, x_scale, x_zero)
    bias: Any = next(iter(biases), None)
    bias = None if bias is None else bias * x_scale * w_scale
    return _quantize(node, convolve(node, x, weight, bias), scale, zero)


@operator("ConvInteger", "MatMulInteger")
def _integers(node: Node, x: Tensor, w: Tensor, *zeros: Tensor | None) -> Tensor:
    x_zero, w_zero = (*zeros, None, None)[:2]
    x, w = x.double(), w.double()
    is_conv = node.operator == "ConvInteger"
    x = x if x_zero is None else x - _by_axis(x_zero.double(), x, 1 if is_conv else -2)
    w = w if w_zero is None else w - _by_axis(w_zero.double(), w, 0 if is_conv else -1)
    return (convolve(node, x, w) if is_conv else x @ w).to(torch.int32)
