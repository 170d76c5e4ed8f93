"""ONNX graphs: what passes build with, stripping, names, counts of what is held and computed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, count, product
from math import prod
from pathlib import Path
from string import ascii_letters
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from compress.artifacts.carried_files import FROZEN_NAME, IMAGES, ONNX_FILE, TOKENIZER
from compress.common.errors import StageFailed
from compress.common.sealed_json import canonical_json
from compress.export.common.runtime import kernel_facts
from compress.version import __version__

if TYPE_CHECKING:
    import numpy as np

    from compress.artifacts.artifact import Artifact

RECURRENT = {"LSTM", "GRU", "RNN"}
INTEGER_LSTM = "DynamicQuantizeLSTM"
PACKED_MATMUL = "MatMulNBits"
PACKED_GATHER = "GatherBlockQuantized"
UNIT_STEPS = {"dilations": 1, "strides": 1, "pads": 0}
"""Values that convolutions and poolings have where the attribute is left out."""
COUNTED = {"Conv", "ConvTranspose", "Gemm", "MatMul", "MatMulInteger", *RECURRENT}
UNCOUNTED = {"Attention", "DeformConv", "Einsum", "If", "Loop", "Scan"}
"""Operators that multiply, or may, in ways that are not counted."""
FIRST_PARAMETER = {
    **{"QuantizeLinear": 1, "DequantizeLinear": 1, "MatMulInteger": 2},
    **{PACKED_MATMUL: 1, PACKED_GATHER: 2, INTEGER_LSTM: 8},
}
"""Operator → place of its first scale or zero point, or of weights packed with them."""
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


def strip_(model: ir.Model, names: Mapping[str, str] | None = None) -> None:
    """Drop stack traces, default attributes and long names, in place; ``names`` are given names."""
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
    _shorten_names_(model, names or {})


def forget_shapes_(graph: ir.Graph) -> None:
    """Forget the types and shapes of values between inputs and outputs, in place."""
    written = (value for node in graph for value in node.outputs)
    for value in chain(graph.initializers.values(), written):
        if not (value.is_graph_input() or value.is_graph_output()):
            value.type = value.shape = None


def _clear_(part: Any) -> None:
    part.doc_string = None
    part.metadata_props.clear()


def _shorten_names_(model: ir.Model, given: Mapping[str, str]) -> None:
    """Rename every value but the model's inputs and outputs: a, b, c … in order of appearance.

    Stored tensors of given names get those instead, where the name is of one alone: the biases of a
    recurrent layer are two, and one in an ONNX file.
    """
    public = {value.name for value in (*model.graph.inputs, *model.graph.outputs)}
    given = {k: n for k, n in given.items() if k in model.graph.initializers and k not in public}
    uses = Counter([*given.values(), *public])
    given = {k: n for k, n in given.items() if uses[n] == 1}
    letters = (map("".join, product(ascii_letters, repeat=length)) for length in count(1))
    unused = (name for name in chain.from_iterable(letters) if name not in uses)
    names: dict[str | None, Any] = {"": "", **{name: name for name in public}}
    names.update(given)
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
    # onnx-ir puts those that it renames last: so all are renamed, some of them to their own name.
    held = (value for graph in model.graphs() for value in graph.initializers.values())
    renamed = [*dict.fromkeys(chain(held, values))]
    ir.convenience.rename_values(renamed, [names.get(v.name, str(v.name)) for v in renamed])


def remove_unread_(model: ir.Model) -> None:
    """Remove operators and tensors that no output needs, in place."""
    RemoveUnusedNodesPass()(model)


def count_operators(model: ir.Model) -> dict[str, int]:
    """Return how many operators of each type a model has."""
    return dict(sorted(Counter(node.op_type for node in model.graph).items()))


def weight_elements(model: ir.Model) -> dict[str, int]:
    """Return stored tensor → elements: of floats, and of integers of 8 bits or dequantized ones.

    Scales, zero points, shapes and scalars are not weights.
    """
    parameters = {value for node in model.graph for value in _scales_and_zero_points(node)}
    elements = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if tensor is None or not tensor.shape or value in parameters:
            continue
        readers = {use.node.op_type for use in value.uses() if use.idx == 0}
        if tensor.dtype in WEIGHT_TYPES or "DequantizeLinear" in readers:
            # A table has two of four bits in a byte.
            elements[name] = tensor.size * (2 if PACKED_GATHER in readers else 1)
    for node in model.graph:
        if node.op_type == PACKED_MATMUL and node.inputs[1]:
            elements[str(node.inputs[1].name)] = prod(_features(node))
    return elements


def _scales_and_zero_points(node: ir.Node) -> Sequence[ir.Value | None]:
    if node.op_type in FIRST_PARAMETER:
        return node.inputs[FIRST_PARAMETER[node.op_type] :]
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
    for value in graph.initializers.values():
        value.const_value = None  # the parts of a copy refer to one another, and keep weights
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
    return node.attributes["K"].as_int(), node.attributes["N"].as_int()  # of a MatMulNBits


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    if value is None:
        return (0,)
    shape = value.shape if value.const_value is None else value.const_value.shape
    return (0,) if shape is None else tuple(d if isinstance(d, int) else 0 for d in shape)


def _macs(node: ir.Node) -> int | None:
    if node.op_type in UNCOUNTED:
        return None
    if node.op_type not in COUNTED:
        return 0
    source, *weights = map(_shape, node.inputs[:3])
    if node.op_type.startswith("MatMul") and not source[-1]:  # only the other one was inferred
        source = (*source[:-1], weights[0][-2:][0])
    # 0: a shape was not inferred
    return _products(node, source, weights, _shape(node.outputs[0])) or None


def _products(
    node: ir.Node, source: Sequence[int], weights: Sequence[Sequence[int]], result: Sequence[int]
) -> int:
    """Return an operator's multiply-accumulates, by the shapes of what it reads and gives."""
    if node.op_type in RECURRENT_KERNELS:
        # Sequence and batch come first in either layout; each step reads both weights once.
        of_inputs, of_states = map(prod, weights[:2])
        return prod(source[:2]) * (of_inputs + of_states) if of_inputs and of_states else 0
    if node.op_type in CONVOLUTIONS:
        return prod(source if node.op_type == "ConvTranspose" else result) * prod(weights[0][1:])
    reduced = source[-2:][0] if node.attributes.get_int("transA") else source[-1]
    return prod(result) * reduced


INPUT = "compress_input_{}"
OUTPUT = "compress_output_{}"
"""Names that the exporter is given, to be renamed afterwards: torch (2.13) lets a value inside keep
a name that an output is given, and the graph is then invalid."""


def add_metadata_(model: ir.Model, source: Artifact, class_names: Sequence[str]) -> tuple[str, ...]:
    """Write properties into a model, in place: each a JSON text, the same for the same source.

    Without ``class_names`` those of the source's Hugging Face config are written, if they are as
    many as the first output's classes. Returns the names written.
    """
    properties: dict[str, Any] = {
        "provenance": {"source": source.digest, "toolkit": f"compress-pipeline {__version__}"},
        "signature": source.signature.model_dump(mode="json"),
    }
    if class_names:
        check_class_count(model, class_names)
    elif class_count(model) == len(carried := source.class_names):
        class_names = carried
    if class_names:
        properties["class_names"] = list(class_names)
        properties["id2label"] = {str(i): name for i, name in enumerate(class_names)}
    preprocessing = {}
    files = source.manifest.files
    if IMAGES in files and (image := source.carried_json(IMAGES)):
        preprocessing["image"] = image
    if TOKENIZER in files and (tokenizer := source.carried_json(TOKENIZER)):
        preprocessing["text"] = {
            "tokenizer_sha256": files[TOKENIZER].sha256,
            "truncation": tokenizer.get("truncation"),
            "padding": tokenizer.get("padding"),
        }
    if preprocessing:
        properties["preprocessing"] = preprocessing
    model.metadata_props.update(
        (key, canonical_json(properties[key])) for key in sorted(properties)
    )
    return tuple(class_names)


def names_of_weights(source: Artifact) -> dict[str, str]:
    """Return the names of weights in the ONNX file that a model came from, by those they have here.

    Traced weights are those of a `module`, and quantized ones have names of their own.
    """
    names: dict[str, str] = (source.carried_json(ONNX_FILE) or {}).get("weights", {})
    names = {prefix + key: name for key, name in names.items() for prefix in ("", "module.")}
    return names | {FROZEN_NAME.format(k.replace(".", "_")): name for k, name in names.items()}


def restore_file_(model: ir.Model, source: Artifact) -> None:
    """Write what the ONNX file that a model came from says beside its graph, in place."""
    if (file := source.carried_json(ONNX_FILE)) is None:
        return
    model.metadata_props.update(file["metadata"])
    model.doc_string, model.graph.name = file["doc_string"], file["name"]
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is not None:
            axes = (d if isinstance(d, int) else file["axes"].get(d.value, d) for d in value.shape)
            value.shape = ir.Shape([*axes])


def class_names_in(properties: Mapping[str, str]) -> list[str]:
    """Return the names of classes in a model's properties; empty where it holds none as JSON."""
    try:
        names: Any = json.loads(properties.get("class_names", "[]"))
    except (ValueError, RecursionError):
        return []
    return names if isinstance(names, list) and all(isinstance(n, str) for n in names) else []


def check_class_count(model: ir.Model, class_names: Sequence[str]) -> None:
    """Raise StageFailed where the first output has another number of classes, if it is known."""
    classes = class_count(model)
    if classes and classes != len(class_names):
        raise StageFailed(
            f"class_names: {len(class_names)} names, and the first output has {classes} classes"
        )


def class_count(model: ir.Model) -> int:
    """Return the size of the first output's last axis; 0 where it is not fixed."""
    shape = model.graph.outputs[0].shape
    return size if shape and isinstance(size := shape[-1], int) else 0


def name_values_(model: ir.Model, names: Mapping[str, str]) -> None:
    """Rename values, in place; an inner value that already has a new name gets another one."""
    values = [*dict.fromkeys(values_in_order(model))]
    taken = {value.name for value in values}
    renamed = dict(names)
    for name in sorted({n for n in names.values() if n in taken} - names.keys()):
        number = next(i for i in range(len(taken) + 1) if f"{name}_inside_{i}" not in taken)
        renamed[name] = f"{name}_inside_{number}"
    rename_values_(model, values, renamed)


RECURRENT_KERNELS = RECURRENT | {INTEGER_LSTM}
CONVOLUTIONS = {"Conv", "FusedConv", "ConvTranspose", "ConvInteger", "QLinearConv"}
FLOAT_KERNELS = {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", *RECURRENT}
INTEGER_KERNELS = {
    *("QGemm", "QAttention", "ConvInteger"),
    *("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"),
}
HEAVY_KERNELS = {
    *CONVOLUTIONS,
    *RECURRENT_KERNELS,
    *("Gemm", "FusedGemm", "QGemm", "MatMul", "FusedMatMul", "QLinearMatMul", PACKED_MATMUL),
    *("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"),
}
UNCOUNTED_KERNELS = UNCOUNTED | {"QAttention", "MultiHeadAttention", "GroupQueryAttention"}
KERNEL_TIME = "_kernel_time"  # what follows an operator's name in the event of its kernel's call
BLOCKED_BATCH_NORM = "_bn_nchwc"  # in the name that onnxruntime gives such a kernel
ACTIVATIONS_IN_8_BITS = 4
"""Value of `accuracy_level` with which MatMulNBits rounds its input, and multiplies integers."""


def count_kernels(optimized: ir.Model) -> dict[str, dict[str, int]]:
    """Return how many integer and float kernels the heavy operators of a rewritten model are."""
    kernels = [node.op_type for node in optimized.graph if not is_batch_norm(node)]
    floats = filter(FLOAT_KERNELS.__contains__, kernels)
    return kernel_facts(filter(is_integer_kernel, kernels), floats)


def is_batch_norm(node: ir.Node) -> bool:
    """Whether a kernel is a batch normalization, as which onnxruntime's blocked layout has a Conv.

    It is one that no convolution takes up, such as behind an activation.
    """
    return node.op_type == "Conv" and BLOCKED_BATCH_NORM in (node.name or "")


def is_integer_kernel(operator: str) -> bool:
    """Whether the kernel of an operator that onnxruntime rewrote to computes in integers."""
    return operator in INTEGER_KERNELS or operator.startswith("QLinear")


def integer_macs_share(optimized: ir.Model, profile: Path) -> float | None:
    """Return the integer kernels' share of the multiply-accumulates of a profiled call of a model.

    None where an operator's products cannot be counted, or nothing is multiplied.
    """
    events = [e for e in json.loads(profile.read_text("utf-8")) if is_kernel_call(e)]
    # Both are in onnxruntime's topological order; names are missing or made up.
    operators = [event["args"]["op_name"] for event in events]
    if [node.op_type for node in optimized.graph] != operators:
        return None
    macs: Counter[bool] = Counter()
    for node, event in zip(optimized.graph, events, strict=True):
        if node.op_type in UNCOUNTED_KERNELS:
            return None
        count, in_integers = kernel_macs(node, event["args"])
        macs[in_integers] += count
    return macs[True] / macs.total() if macs.total() else None


def is_kernel_call(event: Mapping[str, Any]) -> bool:
    """Whether an event of a profile is the call of a kernel."""
    return event["cat"] == "Node" and str(event["name"]).endswith(KERNEL_TIME)


def kernel_macs(node: ir.Node, arguments: Mapping[str, Any]) -> tuple[int, bool]:
    """Return a kernel's multiply-accumulates in a profiled call, and whether it is of integers."""
    in_integers = is_integer_kernel(node.op_type)
    if node.op_type not in HEAVY_KERNELS or is_batch_norm(node):
        return 0, in_integers
    inputs, outputs = (
        [tuple(shape) for tensor in arguments[key] for shape in tensor.values()]
        for key in ("input_type_shape", "output_type_shape")
    )
    # The profile leaves out weights that onnxruntime packed.
    place = 3 if node.op_type == "QLinearConv" else 1
    weights = [sizes(t) if (t := stored(value)) else () for value in node.inputs[place:]]
    if node.op_type in CONVOLUTIONS and not weights[0]:
        weights = inputs[1:]
    if node.op_type == PACKED_MATMUL:
        in_integers = node.attributes.get_int("accuracy_level") == ACTIVATIONS_IN_8_BITS
    return _products(node, inputs[0], weights, outputs[0]), in_integers
