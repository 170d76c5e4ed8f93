"""Forms of layers that onnxruntime's optimizer neither rounds anew nor fails on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from compress.export.onnx.graph import add_tensor, consumers, producer, sizes, stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.export import ExportedProgram

LAYERS = {"Conv", "ConvTranspose", "Gemm"}
CLAMPS = {"Relu", "Clip"}
# onnxruntime's QDQPropagation moves conversions through them, so that they stand at the layer.
MOVES = {"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}

INTEGER_READERS = {"DequantizeLinear", "MatMulInteger"}


def separate_float_layers_(model: ir.Model) -> None:
    """Put a Max with -inf between float layers and the quantization after them, in place."""
    # onnxruntime 1.31 (its optimizer WeightBiasQuantization) rounds the float weight of a layer
    # that stands between DequantizeLinear and QuantizeLinear to 8 bits, with one scale for all
    # channels, while it loads the file: a layer that is in float because it is sensitive loses more
    # than the others. The Max, which changes no number, prevents it. Graphs quantized for GPUs have
    # no such place: there a float layer reads floats.
    graph = model.graph
    for layer in [node for node in graph if node.op_type in LAYERS]:
        weight = stored(layer.inputs[1])
        if weight is None or weight.dtype != ir.DataType.FLOAT:
            continue
        source = producer(layer.inputs[0])
        while source is not None and source.op_type in MOVES:
            source = producer(source.inputs[0])
        reads_dequantized = source is not None and source.op_type == "DequantizeLinear"
        if reads_dequantized and _is_quantized(layer.outputs):
            (value,) = layer.outputs
            lowest = add_tensor(graph, f"{value.name}_lowest", np.array(-np.inf, np.float32))
            limited = ir.Value(name=value.name, type=value.type, shape=value.shape)
            value.replace_all_uses_with(limited, replace_graph_outputs=True)
            value.name = f"{value.name}_float"
            layer.append(ir.node("Max", [value, lowest], outputs=[limited]))


def separate_shared_integers_(model: ir.Model) -> None:
    """Give each reader of int8 weights and zero points tensors of its own, in place.

    A weight stays stored once: others read a Reshape of it, which runtimes compute while they load.
    """
    # With `session.x64quantprecision` onnxruntime 1.32 makes weights unsigned, and fails to load a
    # file in which two operators read one ("Attempt to replace the existing tensor").
    graph = model.graph
    for node in [n for n in graph if n.op_type == "DequantizeLinear" and _int8(n.inputs[0])]:
        (value,) = node.outputs
        for i, reader in enumerate(consumers(value)[1:], start=1):
            copy = ir.Value(name=f"{value.name}_copy{i}")
            node.prepend(ir.node("DequantizeLinear", node.inputs, node.attributes, outputs=[copy]))
            reader.replace_input_with(reader.inputs.index(value), copy)
    latest: dict[ir.Value, ir.Value] = {}
    for node in [n for n in graph if n.op_type in INTEGER_READERS]:
        for place, read in enumerate(node.inputs):
            tensor = _int8(read)
            if read is None or tensor is None:
                continue
            own: ir.Value = read
            name = f"{node.outputs[0].name}_own{place}"
            if read in latest and (place >= 2 or not tensor.shape):  # a zero point, or a scalar
                own = add_tensor(graph, name, tensor.numpy())
            elif read in latest:
                # Of the one before: onnxruntime merges operators that compute the same.
                shape = add_tensor(graph, f"{name}_shape", np.array(sizes(tensor)))
                own = ir.Value(name=name)
                node.prepend(ir.node("Reshape", [latest[read], shape], outputs=[own]))
            node.replace_input_with(place, own)
            latest[read] = own


def _int8(value: ir.Value | None) -> ir.TensorProtocol | None:
    tensor = stored(value)
    return tensor if tensor is not None and tensor.dtype == ir.DataType.INT8 else None


def _is_quantized(values: Sequence[ir.Value]) -> bool:
    """Whether a tensor is quantized, at once or after a clamp and operators that move values."""
    return any(
        reader.op_type == "QuantizeLinear"
        or (reader.op_type in CLAMPS | MOVES and _is_quantized(reader.outputs))
        for value in values
        for reader in consumers(value)
    )


def has_weights_of(program: ExportedProgram, dtype: torch.dtype) -> bool:
    """Whether a program has weights of a type."""
    return any(tensor.dtype is dtype for tensor in program.state_dict.values())


def separate_transposes_(model: ir.Model) -> None:
    """Keep onnxruntime from fusing transposed batches into float16 products, in place."""
    # onnxruntime 1.31 ends the process (SIGSEGV) while it loads a float16 MatMul that reads a
    # Transpose of leading axes. A Reshape to the same shape between the two prevents it.
    graph = model.graph
    for matmul in [node for node in graph if node.op_type == "MatMul"]:
        for place, value in enumerate(matmul.inputs):
            if rank := _transposed_rank(value):
                name = f"{matmul.outputs[0].name}_{place}"
                # 0: the axis as it is
                shape = add_tensor(graph, f"{name}_shape", np.array([0] * (rank - 1) + [-1]))
                reshaped = ir.Value(name=name)
                matmul.prepend(ir.node("Reshape", [value, shape], outputs=[reshaped]))
                matmul.replace_input_with(place, reshaped)


def _transposed_rank(value: ir.Value | None) -> int:
    """Return the rank of a Transpose's result whose last axis stays the last; 0 for others."""
    node = producer(value)
    while node is not None and node.op_type == "Cast":
        node = producer(node.inputs[0])
    if node is None or node.op_type != "Transpose":
        return 0
    order = node.attributes.get_ints("perm", [0])
    return len(order) if order[-1] == len(order) - 1 else 0
