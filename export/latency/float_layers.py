"""Single layers of a quantized ONNX model put back to float, as exporting it with them would."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from compress.common.errors import StageFailed
from compress.export.onnx.graph import (
    PACKED_MATMUL,
    add_tensor,
    become_,
    consumers,
    inputs_of,
    producer,
    remove_unread_,
    sizes,
    stored,
)
from compress.export.onnx.passes.float_layers import separate_float_layers_

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import onnx_ir as ir

    from compress.export.latency.resizing import ResizableModel
    from compress.profiling.interaction_sum import Choice

    Array = np.ndarray[Any, Any]

LAYERS = {"Conv", "Gemm", "MatMul", "MatMulInteger", PACKED_MATMUL}
CLAMPS = {"Relu", "Clip"}
"""Operators after a layer that its kernel computes too."""
MOVES = {"MaxPool", "AveragePool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"}
"""Operators that are computed in integers where what they read is some layer's integers."""
FLOAT = "float"
"""Value of the decision about a layer that is put back."""


def weighted_layers(model: ir.Model) -> list[ir.Node]:
    """Return the layers with weights of two axes and more, in graph order, float ones too."""
    return [node for node in model.graph if node.op_type in LAYERS and weight_of(node) is not None]


def weight_of(layer: ir.Node) -> ir.Value | None:
    """Return the stored weight that a layer multiplies with; None where it has none."""
    value = layer.inputs[1]
    while (node := producer(value, "DequantizeLinear", "Transpose", "Cast")) is not None:
        value = node.inputs[0]
    weight = stored(value)
    return value if weight is not None and len(weight.shape) > 1 else None


def is_float(layer: ir.Node) -> bool:
    """Whether a layer with weights multiplies floats."""
    plain = layer.op_type not in ("MatMulInteger", PACKED_MATMUL)
    return plain and stored(layer.inputs[1]) is not None


def leave_float(
    model: ir.Model, layers: Collection[int], weights: Mapping[int, Array] | None = None
) -> ir.Model:
    """Return a quantized model with some layers in float.

    The operators are those that the stage writes with these layers in `exclude`: what loses its
    last integer neighbour, such as an addition, becomes float with them.

    Args:
        model: a model that `quantize_static`, `quantize_dynamic` or `quantize_weights` made.
        layers: numbers of layers, among :func:`weighted_layers`.
        weights: float weights by number, outputs first; without them values of the right magnitude
            are taken, with which the model has its latency but not its answers.

    Raises:
        StageFailed: a layer has a form that is not known, or a weight has another size.
    """
    changed = model.clone()
    nodes = weighted_layers(changed)
    chosen = {number: nodes[number] for number in sorted(layers)}
    _detach_(changed.graph, chosen.values())
    for number, node in chosen.items():
        _use_floats_(changed.graph, node, None if weights is None else weights[number])
    remove_unread_(changed)
    separate_float_layers_(changed)
    return changed


@dataclass(frozen=True)
class MixedModel:
    """A quantized model of any widths, with any of some layers in float."""

    model: ResizableModel
    layers: Mapping[str, Sequence[int]]
    """Decision → numbers of its layers, among :func:`weighted_layers`; several where a module is
    called several times."""

    def resize(self, choice: Choice) -> ir.Model:
        """Return the model at other widths, and with those layers in float that are chosen so."""
        floats = [decision for decision in self.layers if choice.get(decision) == FLOAT]
        return self._with_floats(self.model.resize(choice), floats)

    def groups_of(self, decision: str) -> set[str]:
        """Return the groups of channels on which the weight of a decision's layer depends."""
        layers = weighted_layers(self.model.model)
        weights = [weight_of(layers[number]) for number in self.layers[decision]]
        groups = self.model.groups_by_weight()
        return {g for w in weights if w is not None for g in groups[str(w.name)]}

    def meet(self, a: str, b: str) -> bool:
        """Whether two layers in float change more than each of them alone.

        So do neighbours, between which nothing is converted, and the terms of an addition.
        """
        none, first, second, both = (
            _operators(self._with_floats(self.model.model, names))
            for names in ((), (a,), (b,), (a, b))
        )
        kinds = none | first | second | both
        return any(none[kind] + both[kind] != first[kind] + second[kind] for kind in kinds)

    def _with_floats(self, model: ir.Model, decisions: Sequence[str]) -> ir.Model:
        numbers = [number for decision in decisions for number in self.layers[decision]]
        return leave_float(model, numbers) if numbers else model


def _operators(model: ir.Model) -> Counter[tuple[str, ...]]:
    """Count the operators by their type and those of their neighbours."""
    return Counter(
        (
            node.op_type,
            *(source.op_type for v in node.inputs if (source := producer(v)) is not None),
            "→",
            *sorted(use.node.op_type for value in node.outputs for use in value.uses()),
        )
        for node in model.graph
    )


def _detach_(graph: ir.Graph, layers: Collection[ir.Node]) -> None:
    """Let layers, and operators that lose their integers with them, read and give floats."""
    integers: set[ir.Node] = set()
    """Operators that stay integer."""
    for node in graph:
        if _was_integer(node) and node not in layers:
            source = _source(node.inputs[0])
            if node.op_type == "Add":
                is_integer = all(_is_rounded_anyway(_source(t), integers) for t in node.inputs)
            elif node.op_type in MOVES:
                is_integer = _is_integer_output(source, integers)
            else:
                is_integer = True
            if is_integer:
                integers.add(node)
    # Found first, then replaced: what reads a value says whether it is an integer one.
    changes = [
        (node, place, source)
        for node in graph
        if node.op_type != "QuantizeLinear" and node not in integers
        for place, value in enumerate(node.inputs)
        if (source := _source(value)) is not value and not _is_integer_output(source, integers)
    ]
    for node, place, source in changes:
        node.replace_input_with(place, source)


def _use_floats_(graph: ir.Graph, node: ir.Node, weight: Array | None) -> None:
    """Let a layer multiply with a float weight."""
    if node.op_type == "MatMulInteger":
        _use_product_(graph, node, weight)
        return
    name = node.outputs[0].name
    if node.op_type == PACKED_MATMUL:
        wide = (node.attributes["N"].as_int(), node.attributes["K"].as_int())
        array = _fitting(weight, wide, _numbers(node.inputs[2])).T
        become_(node, "MatMul", [node.inputs[0], _add_weight(graph, node, array)])
        return
    dequantize = producer(node.inputs[1])
    transposed = dequantize is not None and dequantize.op_type == "Transpose"
    if dequantize is not None and transposed:
        dequantize = producer(dequantize.inputs[0])
    integers = stored(dequantize.inputs[0]) if dequantize is not None else None
    if dequantize is None or dequantize.op_type != "DequantizeLinear" or integers is None:
        names = [value.name for value in inputs_of(node)]
        raise StageFailed(f"a layer that reads {names} has no dequantized weight")
    array = _fitting(weight, sizes(integers), _numbers(dequantize.inputs[1]))
    node.replace_input_with(1, _add_weight(graph, node, array.T if transposed else array))
    bias = producer(node.inputs[2], "DequantizeLinear") if len(node.inputs) > 2 else None
    if bias is not None:
        numbers, scale = map(_numbers, bias.inputs[:2])
        floats = numbers.astype(np.float32) * scale
        node.replace_input_with(2, add_tensor(graph, f"{name}_bias", floats))


def _use_product_(graph: ir.Graph, node: ir.Node, weight: Array | None) -> None:
    """Replace MatMulInteger, and the Cast and the Mul after it, by a float product."""
    names = [value.name for value in inputs_of(node)]
    ranges = producer(node.inputs[0], "DynamicQuantizeLinear")
    casts = consumers(node.outputs[0])
    products = consumers(casts[0].outputs[0]) if len(casts) == 1 else []
    if ranges is None or len(products) != 1:
        raise StageFailed(f"a layer that reads {names} has no range of the call's")
    (product,) = products
    scale = producer(product.inputs[1])
    scales = [value for value in (inputs_of(scale) if scale else ()) if stored(value) is not None]
    if product.op_type != "Mul" or len(scales) != 1:
        raise StageFailed(f"a layer that reads {names} has no scales of its own")
    columns, rows = _numbers(node.inputs[1]).shape
    array = _fitting(weight, (rows, columns), _numbers(scales[0])).T
    become_(product, "MatMul", [ranges.inputs[0], _add_weight(graph, node, array)])


def _add_weight(graph: ir.Graph, node: ir.Node, array: Array) -> ir.Value:
    floats = np.ascontiguousarray(array, np.float32)
    return add_tensor(graph, f"{node.outputs[0].name}_weight", floats)


def _numbers(value: ir.Value | None) -> Array:
    tensor = stored(value)
    if tensor is None:
        raise StageFailed(f"{value} is computed, expected a stored tensor")
    return tensor.numpy()


def _source(value: ir.Value | None) -> ir.Value | None:
    """Return the value of which another one is the rounded form; others are their own."""
    dequantize = producer(value, "DequantizeLinear")
    quantize = producer(dequantize.inputs[0], "QuantizeLinear") if dequantize else None
    return quantize.inputs[0] if quantize else value


def _was_integer(node: ir.Node) -> bool:
    """Whether an operator of the whole quantized model is computed in integers."""
    if node.op_type in LAYERS:
        is_layer = weight_of(node) is not None and stored(node.inputs[1]) is None
        return is_layer and _source(node.inputs[0]) is not node.inputs[0]
    if node.op_type != "Add" and node.op_type not in MOVES:
        return False
    values = node.inputs if node.op_type == "Add" else node.inputs[:1]
    return all(_source(value) is not value for value in values) and _is_rounded(_tail(node))


def _is_rounded(value: ir.Value) -> bool:
    return bool(consumers(value, "QuantizeLinear"))


def _tail(node: ir.Node) -> ir.Value:
    """Return what an operator gives, after a clamp that alone reads it."""
    value = node.outputs[0]
    readers = [use.node for use in value.uses()]
    return readers[0].outputs[0] if len(readers) == 1 and readers[0].op_type in CLAMPS else value


def _is_integer_output(value: ir.Value | None, integers: Collection[ir.Node]) -> bool:
    """Whether an operator that stays integer rounds a value by itself."""
    node = producer(value)
    if node is not None and node.op_type in CLAMPS:
        before = producer(node.inputs[0])
        node = before if before is not None and _tail(before) is value else node
    # A product of sequences gives floats, and what reads them in integers rounds them.
    is_integer = node in integers and node is not None and node.op_type != "MatMul"
    return is_integer and value is not None and _is_rounded(value)


def _is_rounded_anyway(value: ir.Value | None, integers: Collection[ir.Node]) -> bool:
    """Whether an integer operator gives a value, or another one before reads it."""
    if value is None or _is_integer_output(value, integers):
        return value is not None
    return any(
        reader in integers
        for quantize in consumers(value, "QuantizeLinear")
        for dequantize in consumers(quantize.outputs[0], "DequantizeLinear")
        for reader in consumers(dequantize.outputs[0])
    )


def _fitting(weight: Array | None, shape: Sequence[int], scales: Array) -> Array:
    """Return a float weight, or one of scales as values; StageFailed if it has other sizes."""
    if weight is None:
        return np.resize(scales, tuple(shape))
    if weight.shape != tuple(shape):
        raise StageFailed(f"a float weight has sizes {[*weight.shape]}, expected {[*shape]}")
    return weight
