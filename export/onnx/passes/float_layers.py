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
    readers: Readers = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
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


def separate_zero_points_(model: onnx.ModelProto) -> None:
    """Give each int8 weight a zero point of its own, in place; the exporter shares equal ones."""
    # With `session.x64quantprecision` onnxruntime 1.32 makes weights unsigned, and fails to load a
    # file in which two of them share a zero point ("Attempt to replace the existing tensor").
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    seen: set[str] = set()
    for node in graph.node:
        if node.op_type != "DequantizeLinear" or node.input[0] not in tensors:
            continue
        zero_point = tensors.get(node.input[2]) if len(node.input) > 2 else None
        if zero_point is None or zero_point.data_type != onnx.TensorProto.INT8:
            continue
        if zero_point.name in seen:
            copy = graph.initializer.add()
            copy.CopyFrom(zero_point)
            copy.name = node.input[2] = f"{node.output[0]}_zero_point"
        seen.add(zero_point.name)


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
