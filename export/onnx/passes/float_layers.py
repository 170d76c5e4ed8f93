"""Forms of layers that onnxruntime's optimizer neither rounds anew, fails on nor computes apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from compress.export.onnx.graph import (
    add_tensor,
    become_,
    consumers,
    producer,
    remove_unread_,
    sizes,
    stored,
)

if TYPE_CHECKING:
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
            node = producer(value)
            while node is not None and node.op_type == "Cast":
                node = producer(node.inputs[0])
            if node is None or node.op_type != "Transpose":
                continue
            order = node.attributes.get_ints("perm", [0])
            if order[-1] == len(order) - 1:  # the last axis stays the last
                name = f"{matmul.outputs[0].name}_{place}"
                # 0: the axis as it is
                kept = [0] * (len(order) - 1)
                shape = add_tensor(graph, f"{name}_shape", np.array([*kept, -1]))
                reshaped = ir.Value(name=name)
                matmul.prepend(ir.node("Reshape", [value, shape], outputs=[reshaped]))
                matmul.replace_input_with(place, reshaped)


POOLED = {ir.DataType.FLOAT, ir.DataType.FLOAT16}  # by onnxruntime, which averages others, too


def pool_means_(model: ir.Model) -> None:
    """Write means over all of two or more spatial axes as GlobalAveragePool, in place."""
    # onnxruntime pools blocked channels and integers as they lie, and has no such ReduceMean. Of
    # three axes the last is as often features, whose means it fuses into norms, but no poolings.
    for node in model.graph:
        axes = stored(node.inputs[1]) if len(node.inputs) > 1 else None
        source = node.inputs[0] if node.op_type == "ReduceMean" else None
        if axes is None or source is None or source.shape is None or source.dtype not in POOLED:
            continue
        rank = len(source.shape)
        reduced = sorted(axis % rank for axis in axes.numpy().reshape(-1).tolist())
        keeps_axes = node.attributes.get_int("keepdims", 1) == 1
        if keeps_axes and rank > 3 and reduced == [*range(2, rank)]:
            become_(node, "GlobalAveragePool", [source])
    remove_unread_(model)  # the axes


def drop_whole_slices_(model: ir.Model) -> None:
    """Remove Slices without steps that take all of their axes, in place."""
    # torch's forms of recurrent layers slice the states of all layers, also of the only one; and
    # onnxscript's rule (0.7) finds no Slice without steps.
    for node in model.graph:
        source = node.inputs[0] if node.op_type == "Slice" and len(node.inputs) == 4 else None
        ranges = [stored(value) for value in node.inputs[1:]]
        if source is None or source.shape is None or None in ranges:
            continue
        (sliced,) = node.outputs
        places = zip(*(given.numpy().tolist() for given in ranges if given), strict=True)
        sizes_read = ((start, end, source.shape[axis]) for start, end, axis in places)
        is_whole = all(s == 0 and isinstance(n, int) and end >= n for s, end, n in sizes_read)
        if is_whole and not sliced.is_graph_output():
            sliced.replace_all_uses_with(source)
    remove_unread_(model)


class Grid(NamedTuple):
    """Integers that stand for the numbers of a whole tensor."""

    scale: float
    zero_point: int
    dtype: ir.DataType


def fold_zero_pads_(model: ir.Model) -> None:
    """Move constant zero Pads of spatial axes into the Convs that read them, in place.

    Between DequantizeLinear and QuantizeLinear of one scale and zero point these two go, too. Where
    they differ the Pad stays: the conversion between them has to.
    """
    # torch's exporter folds a Pad that a Conv reads at once, but none before integers, and
    # onnxruntime 1.32 computes such a Pad in float, between two conversions. In integers a Conv
    # pads with the zero point, which is what 0.0 is rounded to: no output changes.
    #
    # From the last on: a Pad that another Pad reads is read by a Conv once that one is folded.
    for pad in reversed([node for node in model.graph if node.op_type == "Pad"]):
        cells, source, (padded,) = _spatial_zeros(pad), pad.inputs[0], pad.outputs
        convolutions = _convolutions(padded)
        if not (cells and source and convolutions):
            continue
        quantizers = consumers(padded, "QuantizeLinear")
        dequantize = producer(source, "DequantizeLinear")
        integers = None if dequantize is None else dequantize.inputs[0]
        if dequantize and integers:
            if any(_grid(quantize) != _grid(dequantize) for quantize in quantizers):
                continue
            for quantize in quantizers:
                quantize.outputs[0].replace_all_uses_with(integers)
        padded.replace_all_uses_with(source)
        for convolution in convolutions:
            pads = convolution.attributes.get_ints("pads", [0] * len(cells))
            sums = [have + more for have, more in zip(pads, cells, strict=True)]
            convolution.attributes["pads"] = ir.AttrInt64s("pads", sums)
        remove_unread_(model)


def _spatial_zeros(pad: ir.Node) -> list[int] | None:
    """Return cells before each spatial axis, then behind each; None where a Conv cannot add."""
    _, amounts, fill, axes = [*pad.inputs, None, None, None][:4]
    cells = stored(amounts)
    if cells is None or axes is not None:
        return None
    if pad.attributes.get_string("mode", "constant") != "constant":
        return None
    if fill is not None and ((number := stored(fill)) is None or np.any(number.numpy())):
        return None
    before, behind = cells.numpy().reshape(2, -1).tolist()
    if any((*before[:2], *behind[:2])) or min(*before, *behind) < 0:
        return None
    return [*before[2:], *behind[2:]]


def _convolutions(value: ir.Value, grid: Grid | None = None) -> list[ir.Node] | None:
    """Return all readers of a value, or of its integers; None where one of them is no Conv."""
    if value.is_graph_output():
        return None
    readers: list[ir.Node] = []
    for node, place in value.uses():
        behind: list[ir.Node] | None = None
        if node.op_type == "Conv" and grid is None:
            is_explicit = node.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
            behind = [node] if is_explicit else None
        elif node.op_type == "QuantizeLinear" and grid is None and (own := _grid(node)):
            behind = _convolutions(node.outputs[0], own)
        elif node.op_type == "DequantizeLinear" and grid is not None and _grid(node) == grid:
            behind = _convolutions(node.outputs[0])
        if behind is None or place:
            return None
        readers += behind
    return readers


def _grid(conversion: ir.Node) -> Grid | None:
    """Return the integers of a conversion of a whole tensor; None of channels, or if computed."""
    scale, zero_point = (stored(value) for value in [*conversion.inputs, None, None][1:3])
    if scale is None or zero_point is None or scale.size != 1:
        return None
    return Grid(scale.numpy().item(), zero_point.numpy().item(), zero_point.dtype)
