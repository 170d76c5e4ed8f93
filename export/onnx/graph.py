"""ONNX graphs: traversal, stripping, cutting, and counts of what they hold and compute."""

from __future__ import annotations

from collections import Counter
from itertools import chain, count, product
from math import prod
from string import ascii_letters
from typing import TYPE_CHECKING

import onnx

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Documented = (
        onnx.ModelProto | onnx.GraphProto | onnx.NodeProto | onnx.ValueInfoProto | onnx.TensorProto
    )

RECURRENT = {"LSTM", "GRU", "RNN"}
INTEGER_LSTM = "DynamicQuantizeLSTM"
PACKED_MATMUL = "MatMulNBits"
PACKED_GATHER = "GatherBlockQuantized"
UNIT_STEPS = {"dilations": 1, "strides": 1, "pads": 0}
"""Values that convolutions and poolings have where the attribute is left out."""
COUNTED = {"Conv", "ConvTranspose", "Gemm", "MatMul", "MatMulInteger", *RECURRENT}
UNCOUNTED = {"Attention", "DeformConv", "Einsum", "If", "Loop", "Scan"}
"""Operators that multiply, or may, in ways that are not counted."""

WEIGHT_TYPES = {
    *(onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE),
    *(onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT4),
}


def graphs_in(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and those inside its control flow, such as the branches of an If."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from graphs_in(attribute.g)


def inputs_of(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that an operator reads, those that its branches take from outside too."""
    yield from node.input
    for attribute in node.attribute:
        yield from (output.name for output in attribute.g.output)
        for inner in attribute.g.node:
            yield from inputs_of(inner)


def strip_(model: onnx.ModelProto) -> None:
    """Drop stack traces, default attributes and long names, in place."""
    # The stack traces beside every operator would also make the file depend on the folder it was
    # made in; in a small model they and the names outweigh the weights.
    _clear_(model)
    for graph in graphs_in(model.graph):
        _clear_(graph)
        del graph.value_info[:]  # the runtime infers them again
        for part in (*graph.node, *graph.input, *graph.output, *graph.initializer):
            _clear_(part)
        for tensor in graph.initializer:
            if not tensor.data_location:
                tensor.ClearField("data_location")  # onnx.load leaves the default there
        for node in graph.node:
            if node.domain:  # onnx has no schema of onnxruntime's own operators
                continue
            schema = onnx.defs.get_schema(node.op_type, model.opset_import[0].version)
            defaults = {k: v.default_value for k, v in schema.attributes.items()}
            needed = [
                a
                for a in node.attribute
                if a.SerializeToString() != defaults[a.name].SerializeToString()
                and set(a.ints) != {UNIT_STEPS.get(a.name)}
            ]
            del node.attribute[:]
            node.attribute.extend(needed)
    _shorten_names_(model.graph)


def keep_outputs_(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Keep some outputs, in the order named, with what they need and all inputs, in place."""
    graph = model.graph
    values = {output.name: output for output in graph.output}
    outputs = [values[name] for name in names]
    graph.ClearField("output")
    graph.output.extend(outputs)
    remove_unread_(graph)


def remove_unread_(graph: onnx.GraphProto) -> None:
    """Remove operators and tensors that no output needs, in place."""
    needed = {output.name for output in graph.output}
    for place in reversed(range(len(graph.node))):
        if needed & set(graph.node[place].output):
            needed |= set(inputs_of(graph.node[place]))
        else:
            del graph.node[place]
    # One by one: to clear and extend would copy the weights.
    for place in reversed(range(len(graph.initializer))):
        if graph.initializer[place].name not in needed:
            del graph.initializer[place]


def count_operators(model: onnx.ModelProto) -> dict[str, int]:
    """Return how many operators of each type a model has."""
    return dict(sorted(Counter(node.op_type for node in model.graph.node).items()))


def count_weights(model: onnx.ModelProto) -> int:
    """Count the elements of all weights, see :func:`weight_elements`."""
    return sum(weight_elements(model).values())


def weight_elements(model: onnx.ModelProto) -> dict[str, int]:
    """Return stored tensor → elements: of floats, and of integers of 8 bits or dequantized ones.

    Scales, zero points, shapes and scalars are not weights.
    """
    graph = model.graph
    parameters = set(_scales_and_zero_points(graph))
    quantizing = [n for n in graph.node if n.op_type in ("QuantizeLinear", "DequantizeLinear")]
    dequantized = {n.input[0] for n in quantizing if n.op_type == "DequantizeLinear"}
    products = [node for node in graph.node if node.op_type == PACKED_MATMUL]
    tables = {node.input[0] for node in graph.node if node.op_type == PACKED_GATHER}
    plain = {
        # Two of four bits in a byte.
        tensor.name: prod(tensor.dims) * (2 if tensor.name in tables else 1)
        for tensor in graph.initializer
        if tensor.dims and tensor.name not in parameters
        if tensor.data_type in WEIGHT_TYPES or tensor.name in dequantized
    }
    return plain | {node.input[1]: prod(_sizes(node)) for node in products}


def _scales_and_zero_points(graph: onnx.GraphProto) -> Iterator[str]:
    columns = {t.name for t in graph.initializer if list(t.dims[1:]) == [1]}
    integers = {t.name for t in graph.initializer if t.data_type == onnx.TensorProto.INT8}
    cast_to_float = {
        n.output[0] for n in graph.node if n.op_type == "Cast" and n.input[0] in integers
    }
    at_run_time = {n.output[1] for n in graph.node if n.op_type == "DynamicQuantizeLinear"}
    sums = {n.output[0] for n in graph.node if n.op_type == "MatMulInteger"}
    float_sums = {n.output[0] for n in graph.node if n.op_type == "Cast" and n.input[0] in sums}
    by_row = {n.output[0] for n in graph.node if n.op_type == "Mul" and n.input[0] in float_sums}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            yield from node.input[1:]
        elif node.op_type == "MatMulInteger":
            yield from node.input[2:]
        elif node.op_type == PACKED_MATMUL:
            yield from node.input[1:]
        elif node.op_type == PACKED_GATHER:
            yield from node.input[2:]
        elif node.op_type == INTEGER_LSTM:
            yield from node.input[8:]
        elif node.op_type == "Mul" and node.input[0] in cast_to_float | at_run_time | by_row:
            yield node.input[1]
        elif node.op_type == "Gather" and node.input[0] in columns:
            yield node.input[0]  # one scale for each row of a table


def count_macs(model: onnx.ModelProto) -> int | None:
    """Count the multiply-accumulates of convolutions, products and recurrent layers for one sample.

    None where the shapes cannot be inferred, or an operator's products cannot be counted.
    """
    sized = onnx.ModelProto()
    sized.CopyFrom(model)
    for value in sized.graph.input:
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if size.dim_param:
                size.dim_value = 8 if axis else 1  # as in Signature.example
    _replace_packed_operators_(sized.graph)
    inferred = onnx.shape_inference.infer_shapes(sized, data_prop=True).graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in inferred.initializer}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        shape = value.type.tensor_type.shape
        shapes[value.name] = tuple(d.dim_value for d in shape.dim)
    total: int = 0
    for node in inferred.node:
        macs = _macs(node, shapes)
        if macs is None:
            return None
        total += macs
    batch: int = prod(shapes[inferred.input[0].name][:1])
    return total // batch


def _replace_packed_operators_(graph: onnx.GraphProto) -> None:
    """Replace operators with packed weights by standard ones, in place, for shape inference."""
    sizes = {tensor.name: tensor.dims for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == INTEGER_LSTM:
            for place in (1, 2):
                inputs, gates = sizes[node.input[place]][1:]
                shape = (sizes[node.input[place]][0], gates, inputs)
                node.input[place] += "_floats"
                graph.input.append(
                    onnx.helper.make_tensor_value_info(
                        node.input[place], onnx.TensorProto.FLOAT, shape
                    )
                )
            node.op_type, node.domain = "LSTM", ""
            del node.input[8:]
        if node.op_type == PACKED_GATHER:
            rows, half = sizes[node.input[0]]
            table = onnx.helper.make_tensor_value_info(
                f"{node.output[0]}_table", onnx.TensorProto.FLOAT, (rows, 2 * half)
            )
            graph.input.append(table)
            gather = onnx.helper.make_node("Gather", [table.name, node.input[1]], node.output)
            node.CopyFrom(gather)
        if node.op_type == PACKED_MATMUL:
            weight = onnx.helper.make_tensor_value_info(
                f"{node.output[0]}_weight", onnx.TensorProto.FLOAT, _sizes(node)
            )
            graph.input.append(weight)
            node.CopyFrom(
                onnx.helper.make_node("MatMul", [node.input[0], weight.name], node.output)
            )


def _sizes(node: onnx.NodeProto) -> tuple[int, int]:
    """Return the input and output features of a MatMulNBits."""
    sizes: dict[str, int] = {a.name: a.i for a in node.attribute}
    return sizes["K"], sizes["N"]


def _macs(node: onnx.NodeProto, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Count the multiply-accumulates of one operator; None where that is not known."""
    if node.op_type in UNCOUNTED:
        return None
    if node.op_type not in COUNTED:
        return 0
    left, right = (shapes.get(name, (0,)) for name in node.input[:2])
    if node.op_type in RECURRENT:
        # Sequence and batch come first in either layout; each step reads both weights once.
        steps, recurrent = prod(left[:2]), shapes.get(node.input[2], (0,))
        macs = steps * (prod(right) + prod(recurrent)) if prod(recurrent) and prod(right) else 0
    elif node.op_type == "ConvTranspose":
        macs = prod(left) * prod(right[1:])
    else:
        if node.op_type == "Conv":
            reduced = prod(right[1:])
        elif node.op_type in ("MatMul", "MatMulInteger"):
            reduced = left[-1] or right[-2:][0]  # one of them may not have been inferred
        else:
            transposed = any(a.name == "transA" and a.i for a in node.attribute)
            reduced = left[0] if transposed else left[-1]
        macs = prod(shapes.get(node.output[0], (0,))) * reduced
    return macs or None  # 0: a shape was not inferred


def _clear_(part: Documented) -> None:
    part.ClearField("doc_string")
    del part.metadata_props[:]


def _shorten_names_(graph: onnx.GraphProto) -> None:
    """Rename every value but the model's inputs and outputs: a, b, c … in order of appearance."""
    public = {value.name for value in (*graph.input, *graph.output)}
    letters = (map("".join, product(ascii_letters, repeat=length)) for length in count(1))
    unused = (name for name in chain.from_iterable(letters) if name not in public)
    names: dict[str, str] = {"": "", **{name: name for name in public}}

    def short(name: str) -> str:
        if name not in names:
            names[name] = next(unused)
        return names[name]

    for part in graphs_in(graph):
        for node in part.node:
            node.name = ""
            node.input[:] = [short(name) for name in node.input]
            node.output[:] = [short(name) for name in node.output]
        for value in (*part.initializer, *part.input, *part.output):
            value.name = short(value.name)
