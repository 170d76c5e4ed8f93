"""Single layers of a quantized ONNX model put back to float, as exporting it with them would."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from compress.common.errors import StageFailed
from compress.export.onnx.graph import PACKED_MATMUL, remove_unread_
from compress.export.onnx.passes.float_layers import separate_float_layers_

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

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


def weighted_layers(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the layers with weights of two axes and more, in graph order, float ones too."""
    graph = _Graph(model)
    return [n for n in model.graph.node if n.op_type in LAYERS and graph.weight_of(n) is not None]


def is_float(model: onnx.ModelProto, layer: onnx.NodeProto) -> bool:
    """Whether a layer with weights multiplies floats."""
    graph = _Graph(model)
    weight = graph.weight_of(layer)
    plain = layer.op_type not in ("MatMulInteger", PACKED_MATMUL)
    return plain and weight is not None and weight.name == layer.input[1]


def leave_float(
    model: onnx.ModelProto, layers: Collection[int], weights: Mapping[int, Array] | None = None
) -> onnx.ModelProto:
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
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    nodes = weighted_layers(changed)
    graph = _Graph(changed)
    chosen = {number: nodes[number] for number in sorted(layers)}
    graph.detach_(chosen.values())
    for number, node in chosen.items():
        graph.use_floats_(node, None if weights is None else weights[number])
    remove_unread_(changed.graph)
    separate_float_layers_(changed)
    return changed


@dataclass(frozen=True)
class MixedModel:
    """A quantized model of any widths, with any of some layers in float."""

    model: ResizableModel
    layers: Mapping[str, Sequence[int]]
    """Decision → numbers of its layers, among :func:`weighted_layers`; several where a module is
    called several times."""

    def resize(self, choice: Choice) -> onnx.ModelProto:
        """Return the model at other widths, and with those layers in float that are chosen so."""
        floats = [decision for decision in self.layers if choice.get(decision) == FLOAT]
        return self._with_floats(self.model.resize(choice), floats)

    def groups_of(self, decision: str) -> set[str]:
        """Return the groups of channels on which the weight of a decision's layer depends."""
        model = self.model.model
        layers = weighted_layers(model)
        weights = [_Graph(model).weight_of(layers[number]) for number in self.layers[decision]]
        return {g for one in weights if one is not None for g in self.model.groups_of(one.name)}

    def meet(self, a: str, b: str) -> bool:
        """Whether two layers in float change more than each of them alone.

        So do neighbours, between which nothing is converted, and the terms of an addition.
        """
        none, first, second, both = (
            _Graph(self._with_floats(self.model.model, names)).operators()
            for names in ((), (a,), (b,), (a, b))
        )
        kinds = none | first | second | both
        return any(none[kind] + both[kind] != first[kind] + second[kind] for kind in kinds)

    def _with_floats(self, model: onnx.ModelProto, decisions: Sequence[str]) -> onnx.ModelProto:
        numbers = [number for decision in decisions for number in self.layers[decision]]
        return leave_float(model, numbers) if numbers else model


class _Graph:
    """A graph whose values can be followed to their producers and readers."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._graph = model.graph
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._producers = {name: node for node in model.graph.node for name in node.output}
        self._readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in model.graph.node:
            for name in node.input:
                self._readers[name].append(node)

    def weight_of(self, node: onnx.NodeProto) -> onnx.TensorProto | None:
        """Return the stored weight that a layer multiplies with; None where it has none."""
        name = node.input[1]
        while name not in self._tensors:
            producer = self._producers.get(name)
            if producer is None or producer.op_type not in (
                "DequantizeLinear",
                "Transpose",
                "Cast",
            ):
                return None
            name = producer.input[0]
        weight = self._tensors[name]
        return weight if len(weight.dims) > 1 else None

    def operators(self) -> Counter[tuple[str, ...]]:
        """Count the operators by their type and those of their neighbours."""
        return Counter(
            (
                node.op_type,
                *(self._producers[n].op_type for n in node.input if n in self._producers),
                "→",
                *sorted(reader.op_type for n in node.output for reader in self._readers[n]),
            )
            for node in self._graph.node
        )

    def detach_(self, layers: Collection[onnx.NodeProto]) -> None:
        """Let layers, and operators that lose their integers with them, read and give floats."""
        floats = {node.output[0] for node in layers}
        integers: set[str] = set()
        """First outputs of the operators that stay integer."""
        for node in self._graph.node:
            if self._was_integer(node) and node.output[0] not in floats:
                name = self._source(node.input[0])
                if node.op_type == "Add":
                    terms = [self._source(term) for term in node.input]
                    is_integer = all(self._is_rounded_anyway(t, integers) for t in terms)
                elif node.op_type in MOVES:
                    is_integer = self._is_integer_output(name, integers)
                else:
                    is_integer = True
                if is_integer:
                    integers.add(node.output[0])
        for node in self._graph.node:
            if node.op_type == "QuantizeLinear" or node.output[0] in integers:
                continue
            for place, name in enumerate(node.input):
                source = self._source(name)
                if source != name and not self._is_integer_output(source, integers):
                    node.input[place] = source

    def use_floats_(self, node: onnx.NodeProto, weight: Array | None) -> None:
        """Let a layer multiply with a float weight."""
        if node.op_type == "MatMulInteger":
            self._use_product_(node, weight)
            return
        if node.op_type == PACKED_MATMUL:
            sizes = {attribute.name: attribute.i for attribute in node.attribute}
            scales = numpy_helper.to_array(self._tensors[node.input[2]])
            node.CopyFrom(self._float_product(node, weight, (sizes["N"], sizes["K"]), scales))
            return
        dequantize = self._producers.get(node.input[1])
        transposed = dequantize is not None and dequantize.op_type == "Transpose"
        if dequantize is not None and transposed:
            dequantize = self._producers.get(dequantize.input[0])
        if dequantize is None or dequantize.op_type != "DequantizeLinear":
            raise StageFailed(f"a layer that reads {list(node.input)} has no dequantized weight")
        sizes_ = tuple(self._tensors[dequantize.input[0]].dims)
        scales = numpy_helper.to_array(self._tensors[dequantize.input[1]])
        array = _fitting(weight, sizes_, scales)
        node.input[1] = self._constant(node, array.T if transposed else array)
        bias = self._producers.get(node.input[2]) if len(node.input) > 2 else None
        if bias is not None and bias.op_type == "DequantizeLinear":
            numbers, scale = (numpy_helper.to_array(self._tensors[n]) for n in bias.input[:2])
            tensor = numpy_helper.from_array(
                numbers.astype(np.float32) * scale, f"{node.output[0]}_bias"
            )
            self._graph.initializer.append(tensor)
            node.input[2] = tensor.name

    def _use_product_(self, node: onnx.NodeProto, weight: Array | None) -> None:
        """Replace MatMulInteger, and the Cast and the Mul after it, by a float product."""
        ranges = self._producers.get(node.input[0])
        casts = self._readers[node.output[0]]
        products = self._readers[casts[0].output[0]] if len(casts) == 1 else []
        if ranges is None or ranges.op_type != "DynamicQuantizeLinear" or len(products) != 1:
            raise StageFailed(f"a layer that reads {list(node.input)} has no range of the call's")
        scale = self._producers.get(products[0].input[1])
        constants = [self._tensors.get(name) for name in scale.input] if scale is not None else []
        scales = [numpy_helper.to_array(tensor) for tensor in constants if tensor is not None]
        if products[0].op_type != "Mul" or len(scales) != 1:
            raise StageFailed(f"a layer that reads {list(node.input)} has no scales of its own")
        inputs, outputs = self._tensors[node.input[1]].dims
        node.input[0], name = ranges.input[0], products[0].output[0]
        product = self._float_product(node, weight, (outputs, inputs), scales[0])
        product.output[0] = name
        self._graph.node.remove(products[0])
        node.CopyFrom(product)

    def _float_product(
        self, node: onnx.NodeProto, weight: Array | None, sizes: tuple[int, int], scales: Array
    ) -> onnx.NodeProto:
        constant = self._constant(node, _fitting(weight, sizes, scales).T)
        return helper.make_node("MatMul", [node.input[0], constant], [node.output[0]])

    def _constant(self, node: onnx.NodeProto, array: Array) -> str:
        floats = np.ascontiguousarray(array, np.float32)
        tensor = numpy_helper.from_array(floats, f"{node.output[0]}_weight")
        self._graph.initializer.append(tensor)
        return str(tensor.name)

    def _source(self, name: str) -> str:
        """Return the value of which another one is the rounded form; others are their own."""
        dequantize = self._producers.get(name)
        if dequantize is None or dequantize.op_type != "DequantizeLinear":
            return name
        quantize = self._producers.get(dequantize.input[0])
        if quantize is None or quantize.op_type != "QuantizeLinear":
            return name
        return str(quantize.input[0])

    def _was_integer(self, node: onnx.NodeProto) -> bool:
        """Whether an operator of the whole quantized model is computed in integers."""
        if node.op_type in LAYERS:
            is_layer = self.weight_of(node) is not None and node.input[1] not in self._tensors
            return is_layer and self._source(node.input[0]) != node.input[0]
        if node.op_type != "Add" and node.op_type not in MOVES:
            return False
        values = node.input if node.op_type == "Add" else node.input[:1]
        rounded = all(self._source(name) != name for name in values)
        return rounded and self._is_rounded(self._tail(node))

    def _is_rounded(self, name: str) -> bool:
        return any(reader.op_type == "QuantizeLinear" for reader in self._readers[name])

    def _tail(self, node: onnx.NodeProto) -> str:
        """Return what an operator gives, after a clamp that alone reads it."""
        readers = self._readers[node.output[0]]
        if len(readers) == 1 and readers[0].op_type in CLAMPS:
            return str(readers[0].output[0])
        return str(node.output[0])

    def _is_integer_output(self, name: str, integers: Collection[str]) -> bool:
        """Whether an operator that stays integer rounds a value by itself."""
        node = self._producers.get(name)
        if node is not None and node.op_type in CLAMPS:
            before = self._producers.get(node.input[0])
            node = before if before is not None and self._tail(before) == name else node
        # A product of sequences gives floats, and what reads them in integers rounds them.
        rounds = node is not None and node.op_type != "MatMul" and self._is_rounded(name)
        return node is not None and rounds and node.output[0] in integers

    def _is_rounded_anyway(self, name: str, integers: Collection[str]) -> bool:
        """Whether an integer operator gives a value, or another one before reads it."""
        if self._is_integer_output(name, integers):
            return True
        dequantized = [
            output
            for quantize in self._readers[name]
            if quantize.op_type == "QuantizeLinear"
            for dequantize in self._readers[quantize.output[0]]
            for output in dequantize.output
        ]
        readers = [reader for value in dequantized for reader in self._readers[value]]
        return any(reader.output[0] in integers for reader in readers)


def _fitting(weight: Array | None, sizes: Sequence[int], scales: Array) -> Array:
    """Return a float weight, or one of scales as values; StageFailed if it has other sizes."""
    if weight is None:
        return np.resize(scales, tuple(sizes))
    if weight.shape != tuple(sizes):
        raise StageFailed(f"a float weight has sizes {[*weight.shape]}, expected {[*sizes]}")
    return weight
