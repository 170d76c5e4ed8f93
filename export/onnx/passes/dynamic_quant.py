"""Products with run-time ranges in ONNX: from rounded floats to integer operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_tensor and its kin
from onnx import helper, numpy_helper
from onnxscript import opset18 as op

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

quantized = torch.ops.quantized_decomposed
MIDDLE = np.array(128, np.uint8)
"""What stands for zero where signed integers are held as unsigned ones, which x86 multiplies by
signed weights in one instruction: onnxruntime has no fast kernel for signed activations."""


def _choose(x: Any, _low: int, _high: int, _smallest: float, _dtype: int) -> tuple[Any, Any]:
    _, scale, zero_point = op.DynamicQuantizeLinear(x)
    return scale, zero_point


def _quantize(x: Any, scale: Any, zero_point: Any, _low: int, _high: int, _dtype: int) -> Any:
    return op.QuantizeLinear(x, scale, zero_point)


def _dequantize(x: Any, scale: Any, zero_point: Any, _low: int, _high: int, _dtype: int) -> Any:
    return op.DequantizeLinear(x, scale, zero_point)


def _one_and_zero() -> tuple[Any, Any]:
    """Return the scale and zero point with which integers stay what they are."""
    zero = numpy_helper.from_array(np.zeros((), np.int8))
    return op.Constant(value_float=1.0), op.Constant(value=zero)


def _quantize_rows(x: Any, scale: Any, _zero_point: Any, _low: int, _high: int, _dtype: int) -> Any:
    one, zero = _one_and_zero()
    return op.QuantizeLinear(op.Mul(x, op.Reciprocal(scale)), one, zero)


def _dequantize_rows(
    x: Any, scale: Any, _zero_point: Any, _low: int, _high: int, _dtype: int, _floats: int
) -> Any:
    one, zero = _one_and_zero()
    return op.Mul(op.DequantizeLinear(x, one, zero), scale)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    quantized.choose_qparams.tensor: _choose,
    quantized.quantize_per_tensor.tensor: _quantize,
    quantized.dequantize_per_tensor.tensor: _dequantize,
    quantized.quantize_per_token.default: _quantize_rows,
    quantized.dequantize_per_token.default: _dequantize_rows,
}
"""Operators on ranges found at run time, which torch's exporter has no form for."""


def multiply_integers_(model: onnx.ModelProto) -> None:
    """Turn products of rounded activations and weights into MatMulInteger, in place.

    onnxruntime fuses fixed ranges by itself; of those found at run time it fuses only what its own
    quantizer writes: MatMulInteger, Cast, Mul.
    """
    graph = Graph(model.graph)
    for node in list(model.graph.node):
        if node.op_type in ("MatMul", "Gemm"):
            graph.multiply_integers_(node)
    graph.drop_unread_()


class Graph:
    """An ONNX graph whose values can be followed to what makes them."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._graph = graph
        self._makers = {name: node for node in graph.node for name in node.output}
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._added: set[str] = set()

    def multiply_integers_(self, product: onnx.NodeProto) -> None:
        """Rewrite one product, where both of its operands were rounded."""
        ranged = self._rounded_at_run_time(product.input[0])
        rows = self._rounded_by_row(product.input[0])
        weight = self._rounded_weight(product) if ranged or rows else None
        if weight is None:
            return
        name = product.output[0]
        parts = [f"{name}_{part}" for part in ("sum", "float", "scale", "scaled")]
        total, as_float, both, scaled = parts
        weight_IO, scale_O = weight
        bias = product.input[2] if len(product.input) > 2 else None
        result = scaled if bias else name
        made = []
        if ranged is not None:
            integers, scale, zero_point = ranged.output
            scaling = [
                helper.make_node("Mul", [scale, scale_O], [both]),
                helper.make_node("Mul", [as_float, both], [result]),
            ]
        elif rows is not None:
            values, scale = rows
            integers, zero_point, one = f"{values}_integers", *self._row_constants()
            if integers not in self._makers:
                round_ = helper.make_node("QuantizeLinear", [values, one, zero_point], [integers])
                made.append(round_)
                self._makers[integers] = round_
            scaling = [  # the products of both scales would be as large as the result
                helper.make_node("Mul", [as_float, scale], [both]),
                helper.make_node("Mul", [both, scale_O], [result]),
            ]
        made += [
            helper.make_node("MatMulInteger", [integers, weight_IO, zero_point], [total]),
            helper.make_node("Cast", [total], [as_float], to=onnx.TensorProto.FLOAT),
            *scaling,
        ]
        if bias:
            made.append(helper.make_node("Add", [scaled, bias], [name]))
        place = list(self._graph.node).index(product)
        self._graph.node.remove(product)
        for offset, node in enumerate(made):
            self._graph.node.insert(place + offset, node)

    def drop_unread_(self) -> None:
        """Remove what nothing reads any more."""
        while True:
            read = {name for node in self._graph.node for name in _read_by(node)}
            read |= {output.name for output in self._graph.output}
            idle = [node for node in self._graph.node if not read & set(node.output)]
            if not idle:
                break
            for node in idle:
                self._graph.node.remove(node)
        for tensor in [t for t in self._graph.initializer if t.name not in read]:
            self._graph.initializer.remove(tensor)

    def _rounded_at_run_time(self, name: str) -> onnx.NodeProto | None:
        """Return the DynamicQuantizeLinear whose numbers a value is, turned back into floats."""
        back = self._makers.get(name)
        if back is None or back.op_type != "DequantizeLinear":
            return None
        there, ranged = self._makers.get(back.input[0]), self._makers.get(back.input[1])
        if there is None or ranged is None or ranged.op_type != "DynamicQuantizeLinear":
            return None
        same = there.op_type == "QuantizeLinear" and there.input[0] == ranged.input[0]
        return ranged if same and there.input[1] == back.input[1] else None

    def _rounded_by_row(self, name: str) -> tuple[str, str] | None:
        """Return what of a value was rounded with a scale for each row, and those scales."""
        scaled = self._makers.get(name)
        if scaled is None or scaled.op_type != "Mul":
            return None
        back = self._makers.get(scaled.input[0])
        there = self._makers.get(back.input[0]) if back is not None else None
        if back is None or there is None or back.op_type != "DequantizeLinear":
            return None
        by_one = there.op_type == "QuantizeLinear" and [*there.input[1:]] == [*back.input[1:]]
        divided = self._makers.get(there.input[0]) if by_one else None
        inverse = self._makers.get(divided.input[1]) if divided is not None else None
        if inverse is None or inverse.op_type != "Reciprocal":
            return None
        return (there.input[0], scaled.input[1]) if inverse.input[0] == scaled.input[1] else None

    def _row_constants(self) -> tuple[str, str]:
        """Return the names of the zero point of rows, and of the scale 1."""
        one = np.array(1, np.float32)
        return self._constant("row_zero_point", MIDDLE), self._constant("row_one", one)

    def _rounded_weight(self, product: onnx.NodeProto) -> tuple[str, str] | None:
        """Return a product's weight as integers of inputs by outputs, and the outputs' scales."""
        value, is_OI = product.input[1], False
        attributes = {a.name: helper.get_attribute_value(a) for a in product.attribute}
        if product.op_type == "Gemm":
            plain = all(attributes.get(k, 1.0) == 1.0 for k in ("alpha", "beta"))
            if attributes.get("transA") or not plain:
                return None
            is_OI = bool(attributes.get("transB"))
        maker = self._makers.get(value)
        if maker is not None and maker.op_type == "Transpose":
            is_OI, maker = not is_OI, self._makers.get(maker.input[0])
        if maker is None or maker.op_type != "DequantizeLinear":
            return None
        tensor, scale = (self._constants.get(n) for n in maker.input[:2])
        zero = self._constants.get(maker.input[2]) if len(maker.input) > 2 else None
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
        if name not in self._added:
            self._added.add(name)
            self._graph.initializer.append(numpy_helper.from_array(value, name))
        return name


def _read_by(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that an operator reads, the graphs of its branches among it."""
    yield from node.input
    for attribute in node.attribute:
        for inner in attribute.g.node:
            yield from _read_by(inner)
        yield from (output.name for output in attribute.g.output)
