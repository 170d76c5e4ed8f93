"""Dynamic quantization in ONNX: MatMulInteger for products whose ranges are found at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_tensor and its kin
from onnx import helper, numpy_helper
from onnxscript import opset18 as op

from compress.export.onnx.graph import inputs_of

if TYPE_CHECKING:
    from collections.abc import Callable

quantized = torch.ops.quantized_decomposed
ROW_ZERO_POINT = np.array(128, np.uint8)
"""Signed integers are stored as unsigned ones around 128, which x86 multiplies by signed weights in
one instruction: onnxruntime has no fast kernel for signed activations."""


def _choose_qparams(x: Any, _low: int, _high: int, _eps: float, _dtype: int) -> tuple[Any, Any]:
    _, scale, zero_point = op.DynamicQuantizeLinear(x)
    return scale, zero_point


def _quantize(x: Any, scale: Any, zero_point: Any, _low: int, _high: int, _dtype: int) -> Any:
    return op.QuantizeLinear(x, scale, zero_point)


def _dequantize(x: Any, scale: Any, zero_point: Any, _low: int, _high: int, _dtype: int) -> Any:
    return op.DequantizeLinear(x, scale, zero_point)


def _identity_qparams() -> tuple[Any, Any]:
    """Return the scale and zero point with which integers stay what they are."""
    zero = numpy_helper.from_array(np.zeros((), np.int8))
    return op.Constant(value_float=1.0), op.Constant(value=zero)


def _quantize_rows(x: Any, scale: Any, _zero_point: Any, _low: int, _high: int, _dtype: int) -> Any:
    one, zero = _identity_qparams()
    return op.QuantizeLinear(op.Mul(x, op.Reciprocal(scale)), one, zero)


def _dequantize_rows(
    x: Any, scale: Any, _zero_point: Any, _low: int, _high: int, _dtype: int, _floats: int
) -> Any:
    one, zero = _identity_qparams()
    return op.Mul(op.DequantizeLinear(x, one, zero), scale)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    quantized.choose_qparams.tensor: _choose_qparams,
    quantized.quantize_per_tensor.tensor: _quantize,
    quantized.dequantize_per_tensor.tensor: _dequantize,
    quantized.quantize_per_token.default: _quantize_rows,
    quantized.dequantize_per_token.default: _dequantize_rows,
}
"""Operators on ranges found at run time, which torch's exporter has no form for."""


def fuse_integer_products_(model: onnx.ModelProto) -> None:
    """Turn products of dequantized activations and weights into MatMulInteger, in place."""
    # onnxruntime fuses fixed ranges by itself; of those found at run time it fuses only what its
    # own quantizer writes: MatMulInteger, Cast, Mul.
    graph = model.graph
    rewriter = ProductRewriter(graph)
    for node in list(graph.node):
        if node.op_type in ("MatMul", "Gemm"):
            rewriter.fuse_(node)
    while True:
        read = {name for node in graph.node for name in inputs_of(node)}
        read |= {output.name for output in graph.output}
        unused = [node for node in graph.node if not read & set(node.output)]
        if not unused:
            break
        for node in unused:
            graph.node.remove(node)
    for tensor in [t for t in graph.initializer if t.name not in read]:
        graph.initializer.remove(tensor)


class ProductRewriter:
    """Rewrites the products of one graph, whose values can be followed to their producers."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._producers = {name: node for node in graph.node for name in node.output}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._added: set[str] = set()

    def fuse_(self, product: onnx.NodeProto) -> None:
        """Rewrite one product, where both of its operands were quantized."""
        per_tensor = self._dynamic_range(product.input[0])
        per_row = self._row_quantized(product.input[0])
        weight = self._quantized_weight(product) if per_tensor or per_row else None
        if weight is None:
            return
        name = product.output[0]
        sums, as_float, both, scaled = (
            f"{name}_{part}" for part in ("sum", "float", "scale", "scaled")
        )
        weight_IO, scale_O = weight
        bias = product.input[2] if len(product.input) > 2 else None
        result = scaled if bias else name
        nodes = []
        if per_tensor is not None:
            integers, scale, zero_point = per_tensor.output
            scaling = [
                helper.make_node("Mul", [scale, scale_O], [both]),
                helper.make_node("Mul", [as_float, both], [result]),
            ]
        elif per_row is not None:
            values, scale = per_row
            integers = f"{values}_integers"
            zero_point = self._constant("row_zero_point", ROW_ZERO_POINT)
            one = self._constant("row_one", np.array(1, np.float32))
            if integers not in self._producers:
                round_ = helper.make_node("QuantizeLinear", [values, one, zero_point], [integers])
                nodes.append(round_)
                self._producers[integers] = round_
            scaling = [  # the products of both scales would be as large as the result
                helper.make_node("Mul", [as_float, scale], [both]),
                helper.make_node("Mul", [both, scale_O], [result]),
            ]
        nodes += [
            helper.make_node("MatMulInteger", [integers, weight_IO, zero_point], [sums]),
            helper.make_node("Cast", [sums], [as_float], to=onnx.TensorProto.FLOAT),
            *scaling,
        ]
        if bias:
            nodes.append(helper.make_node("Add", [scaled, bias], [name]))
        place = list(self._graph.node).index(product)
        self._graph.node.remove(product)
        for offset, node in enumerate(nodes):
            self._graph.node.insert(place + offset, node)

    def _dynamic_range(self, name: str) -> onnx.NodeProto | None:
        """Return the DynamicQuantizeLinear whose integers a value is, dequantized."""
        dequantize = self._producers.get(name)
        if dequantize is None or dequantize.op_type != "DequantizeLinear":
            return None
        quantize = self._producers.get(dequantize.input[0])
        ranges = self._producers.get(dequantize.input[1])
        if quantize is None or ranges is None or ranges.op_type != "DynamicQuantizeLinear":
            return None
        same = quantize.op_type == "QuantizeLinear" and quantize.input[0] == ranges.input[0]
        return ranges if same and quantize.input[1] == dequantize.input[1] else None

    def _row_quantized(self, name: str) -> tuple[str, str] | None:
        """Return the value that was quantized with a scale for each row, and the scales."""
        # The form of _quantize_rows followed by _dequantize_rows.
        scaled = self._producers.get(name)
        if scaled is None or scaled.op_type != "Mul":
            return None
        dequantize = self._producers.get(scaled.input[0])
        quantize = self._producers.get(dequantize.input[0]) if dequantize is not None else None
        if dequantize is None or quantize is None or dequantize.op_type != "DequantizeLinear":
            return None
        if quantize.op_type != "QuantizeLinear" or quantize.input[1:] != dequantize.input[1:]:
            return None
        divided = self._producers.get(quantize.input[0])
        if divided is None or len(divided.input) < 2:
            return None
        inverse = self._producers.get(divided.input[1])
        if inverse is None or inverse.op_type != "Reciprocal":
            return None
        return (quantize.input[0], scaled.input[1]) if inverse.input[0] == scaled.input[1] else None

    def _quantized_weight(self, product: onnx.NodeProto) -> tuple[str, str] | None:
        """Return a product's integer weight, inputs by outputs, and the outputs' scales."""
        value, is_OI = product.input[1], False
        attributes = {a.name: helper.get_attribute_value(a) for a in product.attribute}
        if product.op_type == "Gemm":
            plain = all(attributes.get(k, 1.0) == 1.0 for k in ("alpha", "beta"))
            if attributes.get("transA") or not plain:
                return None
            is_OI = bool(attributes.get("transB"))
        producer = self._producers.get(value)
        if producer is not None and producer.op_type == "Transpose":
            is_OI, producer = not is_OI, self._producers.get(producer.input[0])
        if producer is None or producer.op_type != "DequantizeLinear":
            return None
        tensor, scale = (self._constants.get(n) for n in producer.input[:2])
        zero = self._constants.get(producer.input[2]) if len(producer.input) > 2 else None
        symmetric = zero is None or not numpy_helper.to_array(zero).any()
        if tensor is None or scale is None or len(tensor.dims) != 2 or not symmetric:
            return None
        integers = numpy_helper.to_array(tensor)
        scale_O = numpy_helper.to_array(scale).astype(np.float32)
        if scale_O.size not in (1, integers.shape[0 if is_OI else 1]):
            return None
        weight_IO = np.ascontiguousarray(integers.T if is_OI else integers)
        return self._constant(f"{tensor.name}_IO", weight_IO), self._constant(
            f"{scale.name}_O", scale_O
        )

    def _constant(self, name: str, value: np.ndarray[Any, Any]) -> str:
        """Add a constant to the graph once; return its name."""
        if name not in self._added:
            self._added.add(name)
            self._graph.initializer.append(numpy_helper.from_array(value, name))
        return name
