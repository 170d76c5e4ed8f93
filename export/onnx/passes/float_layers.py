"""Layers left in float among integers: onnxruntime is kept from rounding their weights itself."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LAYERS = {"Conv", "ConvTranspose", "Gemm"}
CLAMPS = {"Relu", "Clip"}

Readers = dict[str, list[onnx.NodeProto]]


def keep_floats_(model: onnx.ModelProto) -> None:
    """Part float layers from the rounding after them, in place.

    onnxruntime 1.31 (its optimizer WeightBiasQuantization) rounds the float weight of a layer that
    stands between DequantizeLinear and QuantizeLinear to 8 bits, with one scale for all channels,
    while it loads the file: a layer that is in float because it is sensitive loses more than the
    others. A Max between the two, which changes no number, prevents it.

    In graphs quantized for GPUs there is no such place: only what layers of integers read is
    rounded there, so that a float layer reads floats.
    """
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    readers: Readers = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    floats = {t.name for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    for layer in [n for n in graph.node if n.op_type in LAYERS and n.input[1] in floats]:
        if _is_dequantized(layer.input[0], makers) and _is_rounded(layer.output, readers):
            _part_(graph, layer)


def _is_dequantized(name: str, makers: Mapping[str, onnx.NodeProto]) -> bool:
    return name in makers and makers[name].op_type == "DequantizeLinear"


def _is_rounded(names: Sequence[str], readers: Readers) -> bool:
    """Whether a tensor is quantized, at once or after a clamp."""
    return any(
        reader.op_type == "QuantizeLinear"
        or (reader.op_type in CLAMPS and _is_rounded(reader.output, readers))
        for name in names
        for reader in readers.get(name, ())
    )


def _part_(graph: onnx.GraphProto, layer: onnx.NodeProto) -> None:
    name = layer.output[0]
    lowest, made = f"{name}_lowest", f"{name}_float"
    graph.initializer.append(numpy_helper.from_array(np.array(-np.inf, np.float32), lowest))
    layer.output[0] = made
    node = helper.make_node("Max", [made, lowest], [name])
    graph.node.insert(list(graph.node).index(layer) + 1, node)
