"""ONNX operators that quantize, dequantize and compute with integers."""

from __future__ import annotations

import torch

from compress.graph.from_onnx.elementwise import DTYPES
from compress.graph.from_onnx.layers import convolve
from compress.graph.from_onnx.registry import Node, Unsupported, operator
from compress.graph.from_onnx.shape_tensor import Value, to_tensor


def _by_axis(value: torch.Tensor, x: torch.Tensor, axis: int, block: int = 0) -> torch.Tensor:
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
def _quantize(node: Node, x: torch.Tensor, scale: Value, zero: Value | None = None) -> torch.Tensor:
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    kind = DTYPES[node.get("output_dtype") or 2]
    zero = torch.zeros((), dtype=kind) if zero is None else to_tensor(zero)
    if zero.dtype not in RANGES:
        raise Unsupported(f"to {zero.dtype}")
    low, high = RANGES[zero.dtype]
    scale = _by_axis(to_tensor(scale), x, axis, block).to(x.dtype)
    shift = _by_axis(zero.int().float(), x, axis, block)  # torch converts no uint16 to floats
    y = (torch.round(x / scale).float() + shift).clamp(low, high)
    return y.to(torch.int32).to(zero.dtype)


@operator("DequantizeLinear")
def _dequantize(
    node: Node, x: torch.Tensor, scale: Value, zero: Value | None = None
) -> torch.Tensor:
    axis, block = node.get("axis", 1), node.get("block_size", 0)
    scale = to_tensor(scale)
    if x.dtype not in (*RANGES, torch.int32):
        raise Unsupported(f"from {x.dtype}")
    shift = 0 if zero is None else _by_axis(to_tensor(zero).int(), x, axis, block)
    return (x.int() - shift).to(scale.dtype) * _by_axis(scale, x, axis, block)


@operator("QLinearMatMul")
def _integer_matmul(node: Node, *values: Value) -> torch.Tensor:
    a, a_scale, a_zero, b, b_scale, b_zero, scale, zero = values
    last = Node(node.operator, node.name, (), (), node.opset, {"axis": -1})
    rows = Node(node.operator, node.name, (), (), node.opset, {"axis": -2})
    x = _dequantize(rows, to_tensor(a), a_scale, a_zero)
    return _quantize(last, x @ _dequantize(last, to_tensor(b), b_scale, b_zero), scale, zero)


@operator("QLinearConv")
def _integer_convolve(node: Node, *values: Value) -> torch.Tensor:
    x, x_scale, x_zero, w, w_scale, w_zero, scale, zero, bias = (*values, None)[:9]
    first = Node(node.operator, node.name, (), (), node.opset, {"axis": 0})
    weight = _dequantize(first, to_tensor(w), w_scale, w_zero)
    x = _dequantize(node, to_tensor(x), x_scale, x_zero)
    if bias is not None:
        bias = to_tensor(bias) * to_tensor(x_scale) * to_tensor(w_scale)
    return _quantize(node, convolve(node, x, weight, bias), scale, zero)


@operator("ConvInteger", "MatMulInteger")
def _integers(node: Node, x: Value, w: Value, *zeros: Value | None) -> torch.Tensor:
    x_zero, w_zero = (*(None if z is None else to_tensor(z) for z in zeros), None, None)[:2]
    x, w = to_tensor(x).double(), to_tensor(w).double()
    is_conv = node.operator == "ConvInteger"
    x = x if x_zero is None else x - _by_axis(x_zero.double(), x, 1 if is_conv else -2)
    w = w if w_zero is None else w - _by_axis(w_zero.double(), w, 0 if is_conv else -1)
    return (convolve(node, x, w) if is_conv else x @ w).to(torch.int32)
