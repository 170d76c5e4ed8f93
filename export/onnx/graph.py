"""ONNX graphs: what passes build with, stripping, cutting, counts of what is held and computed."""

from __future__ import annotations

from collections import Counter
from itertools import chain, count, product
from math import prod
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import numpy as np

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
    *(ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE),
    *(ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT4),
}


def producer(value: ir.Value | None, *types: str) -> ir.Node | None:
    """Return the operator that writes a value, if it is of one of these types, or of any."""
    node = None if value is None else value.producer()
    return node if node is None or not types or node.op_type in types else None


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """Return the values that an operator reads, without those that are left out."""
    return [value for value in node.inputs if value is not None]


def consumers(value: ir.Value, *types: str) -> list[ir.Node]:
    """Return the operators that read a value, each once: those of some types, or all."""
    nodes = dict.fromkeys(use.node for use in value.uses())
    return [node for node in nodes if not types or node.op_type in types]


def stored(value: ir.Value | None) -> ir.TensorProtocol | None:
    """Return the tensor that a graph stores for a value; None where it is computed or given."""
    return value.const_value if value is not None and value.is_initializer() else None


def sizes(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """Return a stored tensor's sizes."""
    return tuple(tensor.shape.numpy())


def add_tensor(graph: ir.Graph, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
    """Store an array in a graph, and return its value."""
    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    graph.initializers.add(value)
    return value


def become_(
    node: ir.Node,
    operator: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Any] | None = None,
    *,
    domain: str = "",
) -> None:
    """Turn an operator into another one that writes the same values, in place."""
    node.op_type, node.domain = operator, domain
    made = ir.node(operator, (), attributes).attributes
    node.attributes.clear()
    node.attributes.update(made)
    node.resize_inputs(len(inputs))
    for place, value in enumerate(inputs):
        node.replace_input_with(place, value)


def strip_(model: ir.Model) -> None:
    """Drop stack traces, default attributes and long names, in place."""
    # The stack traces beside every operator would also make the file depend on the folder it was
    # made in; in a small model they and the names outweigh the weights.
    opset = model.opset_imports[""]
    _clear_(model)
    for graph in model.graphs():
        _clear_(graph)
        for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
            _clear_(value)
        forget_shapes_(graph)  # the runtime infers them again
        for node in graph:
            _clear_(node)
            node.name = ""  # of None, a copy of the graph would make a name
            if node.domain:  # onnx has no schema of onnxruntime's own operators
                continue
            schema = onnx.defs.get_schema(node.op_type, opset).attributes
            for name, attribute in [*node.attributes.items()]:
                own = ir.to_proto(attribute).SerializeToString()
                is_default = own == schema[name].default_value.SerializeToString()
                is_unit = name in UNIT_STEPS and {*attribute.as_ints()} == {UNIT_STEPS[name]}
                if is_default or is_unit:
                    del node.attributes[name]
    _shorten_names_(model)


def forget_shapes_(graph: ir.Graph) -> None:
    """Forget the types and shapes of values between inputs and outputs, in place."""
    written = (value for node in graph for value in node.outputs)
    for value in chain(graph.initializers.values(), written):
        if not (value.is_graph_input() or value.is_graph_output()):
            value.type = value.shape = None


def _clear_(part: Any) -> None:
    part.doc_string = None
    part.metadata_props.clear()


def _shorten_names_(model: ir.Model) -> None:
    """Rename every value but the model's inputs and outputs: a, b, c … in order of appearance."""
    public = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    letters = (map("".join, product(ascii_letters, repeat=length)) for length in count(1))
    unused = (name for name in chain.from_iterable(letters) if name not in public)
    names: dict[str | None, Any] = {"": "", **{name: name for name in public}}
    # By name, not by value: a name may stand for one value in each branch of an If.
    values = dict.fromkeys(values_in_order(model))
    for value in values:
        if value.name not in names:
            names[value.name] = next(unused)
    rename_values_(model, values, names)


def values_in_order(model: ir.Model) -> Iterator[ir.Value]:
    """Yield the values of a model in the order of appearance, some of them several times."""
    for graph in model.graphs():
        for node in graph:
            yield from inputs_of(node)
            yield from node.outputs
        yield from chain(graph.initializers.values(), graph.inputs, graph.outputs)


def rename_values_(model: ir.Model, values: Iterable[ir.Value], names: Mapping[Any, str]) -> None:
    """Rename values by their names, in place; initializers keep their order."""
    held = [(graph, [*graph.initializers.values()]) for graph in model.graphs()]
    for graph, _ in held:
        graph.initializers.clear()
    for value in values:
        value.name = names.get(value.name, value.name)
    for graph, initializers in held:
        for value in initializers:
            graph.initializers.add(value)


def remove_unread_(model: ir.Model) -> None:
    """Remove operators and tensors that no output needs, in place."""
    RemoveUnusedNodesPass()(model)


def count_operators(model: ir.Model) -> dict[str, int]:
    """Return how many operators of each type a model has."""
    return dict(sorted(Counter(node.op_type for node in model.graph).items()))


def count_weights(model: ir.Model) -> int:
    """Count the elements of all weights, see :func:`weight_elements`."""
    return sum(weight_elements(model).values())


def weight_elements(model: ir.Model) -> dict[str, int]:
    """Return stored tensor → elements: of floats, and of integers of 8 bits or dequantized ones.

    Scales, zero points, shapes and scalars are not weights.
    """
    parameters = {value for node in model.graph for value in _scales_and_zero_points(node)}
    elements = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        dequantized = any(
            use.node.op_type == "DequantizeLinear" and use.idx == 0 for use in value.uses()
        )
        if tensor is None or not tensor.shape or value in parameters:
            continue
        if tensor.dtype in WEIGHT_TYPES or dequantized:
            # Two of four bits in a byte.
            is_table = any(
                use.idx == 0 for use in value.uses() if use.node.op_type == PACKED_GATHER
            )
            elements[name] = tensor.size * (2 if is_table else 1)
    products = (node for node in model.graph if node.op_type == PACKED_MATMUL)
    packed = {
        str(node.inputs[1].name): prod(_features(node)) for node in products if node.inputs[1]
    }
    return elements | packed


def _scales_and_zero_points(node: ir.Node) -> Sequence[ir.Value | None]:
    """Return the inputs of an operator that are scales or zero points, or packed with them."""
    first = {
        **{"QuantizeLinear": 1, "DequantizeLinear": 1, "MatMulInteger": 2},
        **{PACKED_MATMUL: 1, PACKED_GATHER: 2, INTEGER_LSTM: 8},
    }
    if node.op_type in first:
        return node.inputs[first[node.op_type] :]
    source = node.inputs[0] if node.inputs else None
    if node.op_type == "Mul" and _is_scaled(source):
        return node.inputs[1:2]
    table = stored(source)
    if node.op_type == "Gather" and table is not None and sizes(table)[1:] == (1,):
        return (source,)  # one scale for each row of a table
    return ()


def _is_scaled(value: ir.Value | None) -> bool:
    """Whether a factor of a value is the scale of integers that it was made of."""
    node = producer(value, "Cast", "DynamicQuantizeLinear", "Mul")
    if node is None or value is None:
        return False
    if node.op_type == "DynamicQuantizeLinear":
        return value.index() == 1
    if node.op_type == "Cast":
        weight = stored(node.inputs[0])
        return weight is not None and weight.dtype == ir.DataType.INT8
    cast = producer(node.inputs[0], "Cast")
    return cast is not None and producer(cast.inputs[0], "MatMulInteger") is not None


def count_macs(model: ir.Model, sizes: Mapping[str, int] | None = None) -> int | None:
    """Count the multiply-accumulates of convolutions, products and recurrent layers for one sample.

    Named axes have their number in `sizes`, by default 8 elements as in :meth:`Signature.example`.
    None where the shapes cannot be inferred, or an operator's products cannot be counted.
    """
    sized = model.clone()
    graph = sized.graph
    for value in graph.inputs:
        for axis, size in enumerate(shape := value.shape or ir.Shape([])):
            if isinstance(size, ir.SymbolicDim) and size.value:
                shape[axis] = (sizes or {}).get(size.value, 8) if axis else 1
    batch = prod(_shape(graph.inputs[0])[:1])
    for node in graph:
        _use_standard_operator_(graph, node)
    ShapeInferencePass(check_type=False, strict_mode=False)(sized)
    macs = [_macs(node) for node in graph]
    return None if None in macs else sum(n for n in macs if n) // batch


def _use_standard_operator_(graph: ir.Graph, node: ir.Node) -> None:
    """Replace an operator with packed weights by a standard one, in place, for shape inference."""

    def floats(place: int, *shape: int) -> ir.Value:
        name = f"{node.outputs[0].name}_floats{place}"
        graph.inputs.append(ir.val(name, ir.DataType.FLOAT, shape))
        return graph.inputs[-1]

    inputs, packed = [*node.inputs], [sizes(t) if (t := stored(v)) else () for v in node.inputs]
    if node.op_type == INTEGER_LSTM:
        for place in (1, 2):
            directions, features, gates = packed[place]
            inputs[place] = floats(place, directions, gates, features)
        become_(node, "LSTM", inputs[:8], node.attributes)
    elif node.op_type == PACKED_GATHER:
        rows, half = packed[0]
        become_(node, "Gather", [floats(0, rows, 2 * half), inputs[1]])
    elif node.op_type == PACKED_MATMUL:
        become_(node, "MatMul", [inputs[0], floats(1, *_features(node))])


def _features(node: ir.Node) -> tuple[int, int]:
    """Return the input and output features of a MatMulNBits."""
    return node.attributes["K"].as_int(), node.attributes["N"].as_int()


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    """Return a value's sizes, with 0 for those that are not known."""
    if value is None:
        return (0,)
    shape = value.shape if value.const_value is None else value.const_value.shape
    return (0,) if shape is None else tuple(d if isinstance(d, int) else 0 for d in shape)


def _macs(node: ir.Node) -> int | None:
    """Count the multiply-accumulates of one operator; None where that is not known."""
    if node.op_type in UNCOUNTED:
        return None
    if node.op_type not in COUNTED:
        return 0
    left, right = map(_shape, node.inputs[:2])
    if node.op_type in RECURRENT:
        # Sequence and batch come first in either layout; each step reads both weights once.
        steps, recurrent = prod(left[:2]), _shape(node.inputs[2])
        macs = steps * (prod(right) + prod(recurrent)) if prod(recurrent) and prod(right) else 0
    elif node.op_type == "ConvTranspose":
        macs = prod(left) * prod(right[1:])
    else:
        if node.op_type == "Conv":
            reduced = prod(right[1:])
        elif node.op_type in ("MatMul", "MatMulInteger"):
            reduced = left[-1] or right[-2:][0]  # one of them may not have been inferred
        else:
            reduced = left[0] if node.attributes.get_int("transA") else left[-1]
        macs = prod(_shape(node.outputs[0])) * reduced
    return macs or None  # 0: a shape was not inferred
