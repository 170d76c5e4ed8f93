"""Layers left in float among integer ones: keep onnxruntime from quantizing their weights."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx import helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYERS = {"Conv", "ConvTranspose", "Gemm"}
CLAMPS = {"Relu", "Clip"}

Readers = dict[str, list[onnx.NodeProto]]


def separate_float_layers_(model: onnx.ModelProto) -> None:
    """Put an operator between float layers and the quantization after them, in place.

    onnxruntime 1.31 (its optimizer WeightBiasQuantization) rounds the float weight of a layer that
    stands between DequantizeLinear and QuantizeLinear to 8 bits, with one scale for all channels,
    while it loads the file: a layer that is in float because it is sensitive loses more than the
    others. A Max with -inf between the two, which changes no number, prevents it.

    In graphs quantized for GPUs there is no such place: only what layers of integers read is
    quantized there, so that a float layer reads floats.
    """
    graph = model.graph
    producers = {name: node for node in graph.node for name in node.output}
    readers: Readers = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    floats = {t.name for t in graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    for layer in [n for n in graph.node if n.op_type in LAYERS and n.input[1] in floats]:
        producer = producers.get(layer.input[0])
        reads_dequantized = producer is not None and producer.op_type == "DequantizeLinear"
        if reads_dequantized and _is_quantized(layer.output, readers):
            name = layer.output[0]
            lowest, result = f"{name}_lowest", f"{name}_float"
            graph.initializer.append(numpy_helper.from_array(np.array(-np.inf, np.float32), lowest))
            layer.output[0] = result
            node = helper.make_node("Max", [result, lowest], [name])
            graph.node.insert(list(graph.node).index(layer) + 1, node)


def _is_quantized(names: Sequence[str], readers: Readers) -> bool:
    """Whether a tensor is quantized, at once or after a clamp."""
    return any(
        reader.op_type == "QuantizeLinear"
        or (reader.op_type in CLAMPS and _is_quantized(reader.output, readers))
        for name in names
        for reader in readers.get(name, ())
    )
