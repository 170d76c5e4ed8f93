"""Smaller forms of what quantized layers store: weights in 4 bits, biases without own scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import torch

from compress.export.onnx.graph import (
    add_tensor,
    consumers,
    inputs_of,
    rename_values_,
    sizes,
    stored,
)

if TYPE_CHECKING:
    from torch.export import ExportedProgram

INT4_OPSET = 21  # the first ONNX operator set with integers of 4 bits
INT4 = -8, 7  # smallest and largest integer of 4 bits
SMALLEST_WEIGHT = 64  # numbers from which 4 bits outweigh the Cast that they take
WEIGHT_READERS = {"DequantizeLinear", "QLinearConv", "QLinearMatMul", "QGemm"}


def has_four_bit_weights(program: ExportedProgram) -> bool:
    """Whether a program has integer weights that `compact_` stores in 4 bits."""
    return any(
        tensor.dtype is torch.int8
        and _is_worthwhile(tensor.shape)
        and INT4[0] <= int(tensor.min()) <= int(tensor.max()) <= INT4[1]
        for tensor in program.state_dict.values()
    )


def compact_(model: ir.Model) -> None:
    """Store what quantized layers read in fewer bytes, in place; answers stay the same.

    Weights whose integers fit in 4 bits are stored so, with a Cast to 8 bits after them: runtimes
    fold it while they load the file, and so compute as with weights in 8 bits. That is not done in
    operator sets without such integers, nor for signed activations, as GPUs have them: TensorRT
    knows 4 bits in other places alone.
    """
    graph = model.graph
    _use_float_biases_(graph)
    roundings = [node for node in graph if node.op_type == "QuantizeLinear"]
    zero_points = [stored(node.inputs[-1]) for node in roundings]
    is_signed = any(t is not None and t.dtype == ir.DataType.INT8 for t in zero_points)
    if model.opset_imports[""] < INT4_OPSET or is_signed:
        return
    narrow = []
    for name, value in graph.initializers.items():
        tensor = value.const_value
        if tensor is None or tensor.dtype != ir.DataType.INT8 or not _is_worthwhile(sizes(tensor)):
            continue
        integers = tensor.numpy()
        fits = INT4[0] <= integers.min() and integers.max() <= INT4[1]
        if not fits or not {node.op_type for node in consumers(value)} <= WEIGHT_READERS:
            continue
        # Two in a byte, of which the first takes the lower half.
        nibbles = integers.flatten().view(np.uint8) & 15
        nibbles = np.pad(nibbles, (0, nibbles.size % 2))
        packed = nibbles[::2] | nibbles[1::2] << 4
        shape = sizes(tensor)
        value.const_value = ir.PackedTensor(packed, ir.DataType.INT4, shape=shape, name=name)
        wide = ir.Value(name=name)
        value.replace_all_uses_with(wide)
        cast = ir.node("Cast", [value], {"to": ir.DataType.INT8}, outputs=[wide])
        graph.insert_before(graph[0], cast)
        narrow.append(value)
    rename_values_(model, narrow, {value.name: f"{value.name}_int4" for value in narrow})


def _use_float_biases_(graph: ir.Graph) -> None:
    """Store the integer biases of convolutions as the floats that they stand for, in place."""
    # 4 bytes for a channel instead of 8 and a zero point, in a small depthwise network a tenth of
    # the file. onnxruntime rounds them again while it loads the file (since 1.23 also where a Clip
    # follows the convolution), to the same integers, as the scale is the same. Of Gemm it does not.
    convolutions = [node for node in graph if node.op_type == "Conv" and len(node.inputs) > 2]
    biases = {node.inputs[2] for node in convolutions}
    freed: set[ir.Value] = set()
    for node in graph:
        if node.op_type != "DequantizeLinear" or node.outputs[0] not in biases:
            continue
        integers, scale = map(stored, node.inputs[:2])
        if integers is None or scale is None or integers.dtype != ir.DataType.INT32:
            continue
        floats = integers.numpy().astype(np.float32) * scale.numpy()
        freed |= {*inputs_of(node)}
        (bias,) = node.outputs
        bias.replace_all_uses_with(add_tensor(graph, str(bias.name), floats))
        graph.remove(node, safe=True)
    for value in freed:
        if not value.uses() and value.is_initializer():
            del graph.initializers[str(value.name)]


def _is_worthwhile(shape: Sequence[int]) -> bool:
    return len(shape) > 1 and int(np.prod(shape)) >= SMALLEST_WEIGHT
