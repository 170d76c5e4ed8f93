"""Zero padding as an attribute of the convolution after it, in float and in integers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from compress.export.onnx.graph import consumers, producer, remove_unread_, stored


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
