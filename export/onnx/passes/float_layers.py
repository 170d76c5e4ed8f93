"""Forms of layers that onnxruntime's optimizer neither rounds anew nor fails on."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.export import ExportedProgram

LAYERS = {"Conv", "ConvTranspose", "Gemm"}
CLAMPS = {"Relu", "Clip"}
# onnxruntime's QDQPropagation moves conversions through them, so that they stand at the layer.
MOVES = {"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}

INTEGER_READERS = {"DequantizeLinear", "MatMulInteger"}

Readers = dict[str, list[onnx.NodeProto]]


def separate_float_layers_(model: onnx.ModelProto) -> None:
    """Put a Max with -inf between float layers and the quantization after them, in place."""
    # onnxruntime 1.31 (its optimizer WeightBiasQuantization) rounds the float weight of a layer
    # that stands between DequantizeLinear and QuantizeLinear to 8 bits, with one scale for all
    # channels, while it loads the file: a layer that is in float because it is sensitive loses more
    # than the others. The Max, which changes no number, prevents it. Graphs quantized for GPUs have
    # no such place: there a float layer reads floats.
    graph = model.graph
    producers = {name: node for node in graph.node for name in node.output}
    readers = _readers(graph)
    floats = {t.name for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    for layer in [n for n in graph.node if n.op_type in LAYERS and n.input[1] in floats]:
        producer = producers.get(layer.input[0])
        while producer is not None and producer.op_type in MOVES:
            producer = producers.get(producer.input[0])
        reads_dequantized = producer is not None and producer.op_type == "DequantizeLinear"
        if reads_dequantized and _is_quantized(layer.output, readers):
            name = layer.output[0]
            lowest, result = f"{name}_lowest", f"{name}_float"
            graph.initializer.append(numpy_helper.from_array(np.array(-np.inf, np.float32), lowest))
            layer.output[0] = result
            node = helper.make_node("Max", [result, lowest], [name])
            graph.node.insert(list(graph.node).index(layer) + 1, node)


def separate_shared_integers_(model: onnx.ModelProto) -> None:
    """Give each reader of int8 weights and zero points tensors of its own, in place.

    A weight stays stored once: others read a Reshape of it, which runtimes compute while they load.
    """
    # With `session.x64quantprecision` onnxruntime 1.32 makes weights unsigned, and fails to load a
    # file in which two operators read one ("Attempt to replace the existing tensor").
    graph = model.graph
    readers = _readers(graph)
    tensors = {t.name: t for t in graph.initializer if t.data_type == onnx.TensorProto.INT8}
    for node in [*graph.node]:
        if node.op_type != "DequantizeLinear" or node.input[0] not in tensors:
            continue
        for i, reader in enumerate(readers[node.output[0]][1:], start=1):
            copy = helper.make_node("DequantizeLinear", node.input, [f"{node.output[0]}_copy{i}"])
            copy.attribute.extend(node.attribute)
            graph.node.insert(list(graph.node).index(node), copy)
            place = list(reader.input).index(node.output[0])
            reader.input[place] = copy.output[0]
    latest: dict[str, str] = {}
    for node in [n for n in graph.node if n.op_type in INTEGER_READERS]:
        for place, name in enumerate(node.input):
            if name not in tensors:
                continue
            tensor = tensors[name]
            if name in latest and (place >= 2 or not tensor.dims):  # a zero point, or a scalar
                copy = graph.initializer.add()
                copy.CopyFrom(tensor)
                node.input[place] = copy.name = f"{node.output[0]}_own{place}"
            elif name in latest:
                # Of the one before: onnxruntime merges operators that compute the same.
                node.input[place] = own = f"{node.output[0]}_own{place}"
                shape = numpy_helper.from_array(np.array(tensor.dims), f"{own}_shape")
                graph.initializer.append(shape)
                reshape = helper.make_node("Reshape", [latest[name], shape.name], [own])
                graph.node.insert(list(graph.node).index(node), reshape)
            latest[name] = node.input[place]


def _readers(graph: onnx.GraphProto) -> Readers:
    readers: Readers = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    return readers


def _is_quantized(names: Sequence[str], readers: Readers) -> bool:
    """Whether a tensor is quantized, at once or after a clamp and operators that move values."""
    return any(
        reader.op_type == "QuantizeLinear"
        or (reader.op_type in CLAMPS | MOVES and _is_quantized(reader.output, readers))
        for name in names
        for reader in readers.get(name, ())
    )


def has_weights_of(program: ExportedProgram, dtype: torch.dtype) -> bool:
    """Whether a program has weights of a type."""
    return any(tensor.dtype is dtype for tensor in program.state_dict.values())


def separate_transposes_(model: onnx.ModelProto) -> None:
    """Keep onnxruntime from fusing transposed batches into float16 products, in place."""
    # onnxruntime 1.31 ends the process (SIGSEGV) while it loads a float16 MatMul that reads a
    # Transpose of leading axes. A Reshape to the same shape between the two prevents it.
    graph = model.graph
    producers = {name: node for node in graph.node for name in node.output}
    for product in [node for node in graph.node if node.op_type == "MatMul"]:
        for place, name in enumerate(product.input):
            rank = _transposed_rank(producers, name)
            if rank:
                shape = np.array([0] * (rank - 1) + [-1], np.int64)  # 0: the axis as it is
                reshaped = f"{product.output[0]}_{place}"
                graph.initializer.append(numpy_helper.from_array(shape, f"{reshaped}_shape"))
                reshape = helper.make_node("Reshape", [name, f"{reshaped}_shape"], [reshaped])
                graph.node.insert(list(graph.node).index(product), reshape)
                product.input[place] = reshaped


def _transposed_rank(producers: dict[str, onnx.NodeProto], name: str) -> int:
    """Return the rank of a Transpose's result whose last axis stays the last; 0 for others."""
    producer = producers.get(name)
    while producer is not None and producer.op_type == "Cast":
        producer = producers.get(producer.input[0])
    if producer is None or producer.op_type != "Transpose":
        return 0
    order = next((list(a.ints) for a in producer.attribute if a.name == "perm"), [0])
    return len(order) if order[-1] == len(order) - 1 else 0
