"""Smaller forms of what quantized layers store: weights in 4 bits, biases without own scales."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from compress.export.onnx.graph import inputs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.export import ExportedProgram

INT4_OPSET = 21
"""The first ONNX operator set with integers of 4 bits."""
INT4 = -8, 7
"""Smallest and largest integer of 4 bits."""
SMALLEST_WEIGHT = 64
"""Numbers from which 4 bits outweigh the Cast that they take."""
WEIGHT_READERS = {"DequantizeLinear", "QLinearConv", "QLinearMatMul", "QGemm"}


def has_four_bit_weights(program: ExportedProgram) -> bool:
    """Whether a program has integer weights that `compact_` stores in 4 bits."""
    return any(
        tensor.dtype is torch.int8
        and _is_worthwhile(tensor.shape)
        and INT4[0] <= int(tensor.min()) <= int(tensor.max()) <= INT4[1]
        for tensor in program.state_dict.values()
    )


def compact_(model: onnx.ModelProto) -> None:
    """Store what quantized layers read in fewer bytes, in place; answers stay the same."""
    _use_float_biases_(model.graph)
    _store_four_bits_(model)


def _store_four_bits_(model: onnx.ModelProto) -> None:
    """Store weights whose integers fit in 4 bits so, with a Cast to 8 bits after them, in place.

    Runtimes fold the Cast while they load the file, and so compute as with weights in 8 bits.
    Nothing is done in operator sets without such integers, nor for signed activations, as GPUs have
    them: TensorRT knows 4 bits in other places alone.
    """
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    zero_points = {n.input[-1] for n in graph.node if n.op_type == "QuantizeLinear"}
    is_signed = any(
        tensors[name].data_type == onnx.TensorProto.INT8 for name in zero_points & tensors.keys()
    )
    if model.opset_import[0].version < INT4_OPSET or is_signed:
        return
    readers: dict[str, set[str]] = defaultdict(set)
    for node in graph.node:
        for name in node.input:
            readers[name].add(node.op_type)
    for tensor in tensors.values():
        if tensor.data_type != onnx.TensorProto.INT8 or not _is_worthwhile(tensor.dims):
            continue
        integers = numpy_helper.to_array(tensor)
        fits = INT4[0] <= integers.min() and integers.max() <= INT4[1]
        if not fits or not readers[tensor.name] <= WEIGHT_READERS:
            continue
        unpacked, tensor.name = tensor.name, f"{tensor.name}_int4"
        tensor.data_type = onnx.TensorProto.INT4
        # Two in a byte, of which the first takes the lower half.
        nibbles = integers.flatten().view(np.uint8) & 15
        nibbles = np.pad(nibbles, (0, nibbles.size % 2))
        tensor.raw_data = (nibbles[::2] | nibbles[1::2] << 4).tobytes()
        cast = helper.make_node("Cast", [tensor.name], [unpacked], to=onnx.TensorProto.INT8)
        graph.node.insert(0, cast)


def _use_float_biases_(graph: onnx.GraphProto) -> None:
    """Store the integer biases of convolutions as the floats that they stand for, in place."""
    # 4 bytes for a channel instead of 8 and a zero point, in a small depthwise network a tenth of
    # the file. onnxruntime rounds them again while it loads the file (since 1.23 also where a Clip
    # follows the convolution), to the same integers, as the scale is the same. Of Gemm it does not.
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    convolutions = [node for node in graph.node if node.op_type == "Conv"]
    biases = {node.input[2] for node in convolutions if len(node.input) > 2}
    freed: set[str] = set()
    for node in list(graph.node):
        if node.op_type != "DequantizeLinear" or node.output[0] not in biases:
            continue
        integers, scale = (tensors.get(name) for name in node.input[:2])
        if integers is None or scale is None or integers.data_type != onnx.TensorProto.INT32:
            continue
        floats = numpy_helper.to_array(integers).astype(np.float32) * numpy_helper.to_array(scale)
        graph.initializer.append(numpy_helper.from_array(floats, node.output[0]))
        graph.node.remove(node)
        freed |= set(node.input)
    freed -= {name for node in graph.node for name in inputs_of(node)}
    for name in sorted(freed):
        graph.initializer.remove(tensors[name])


def _is_worthwhile(shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape is a weight, and large enough."""
    return len(shape) > 1 and int(np.prod(shape)) >= SMALLEST_WEIGHT
