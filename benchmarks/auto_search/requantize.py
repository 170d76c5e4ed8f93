"""A quantized graph for other weights: what `quantize_static` would make, without an export.

The stage and an export take seconds for each model of a space. Between two models of one network
only sizes and numbers differ: weights, their scales, and the ranges of activations, which are found
here as the stage finds them. That both lose the same is checked by the build.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from compress.export.latency.resizing import weighted_layers

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    Array = np.ndarray[Any, Any]

INTEGERS, LARGEST = 127, 255
"""Most of a weight of 8 bits, and of an activation."""


def requantized(
    graph: ir.Model,
    weights: Mapping[int, tuple[Array, Array]],
    samples: Array,
) -> ir.Model:
    """Return a graph of layers in 8-bit integers for other weights.

    Args:
        graph: as `quantize_static` makes it for a network of convolutions with a linear layer.
        weights: number of a layer → its weight and its bias in float.
        samples: inputs on which the ranges of activations are observed.
    """
    layers = {node.outputs[0].name: number for number, node in enumerate(weighted_layers(graph))}
    found = ir.to_proto(graph)
    floats = _without_rounding(found, layers, weights)
    rounded = [n for n in found.graph.node if n.op_type == "QuantizeLinear"]
    ranges = _ranges(floats, [node.input[0] for node in rounded], samples)
    tensors: dict[str, Array] = {}
    scale_of: dict[str, Array] = {}
    source: dict[str, tuple[str, str]] = {}
    producers = {name: node for node in found.graph.node for name in node.output}
    for node in found.graph.node:
        if node.op_type == "QuantizeLinear":
            low, high = ranges[node.input[0]]
            scale = np.float32((high - low) / LARGEST)
            names = f"{node.output[0]}_scale", f"{node.output[0]}_zero"
            zero = np.uint8(np.clip(np.round(-low / scale), 0, LARGEST))
            tensors |= zip(names, (scale, zero), strict=True)
            node.input[1:3] = source[node.output[0]] = names
        elif node.op_type == "DequantizeLinear" and node.input[0] in source:
            scale_of[node.output[0]] = tensors[source[node.input[0]][0]]
            node.input[1:3] = source[node.input[0]]
        elif node.output[0] in layers:
            weight, bias = weights[layers[node.output[0]]]
            per_row = np.abs(weight).reshape(len(weight), -1).max(1) / INTEGERS
            scales = np.maximum(per_row, np.finfo(np.float32).eps).astype(np.float32)
            rows = scales.reshape(-1, *[1] * (weight.ndim - 1))
            integers = np.clip(np.round(weight / rows), -INTEGERS, INTEGERS).astype(np.int8)
            _set(producers[node.input[1]], integers, scales, tensors)
            scales = scales * scale_of[node.input[0]]
            _set(
                producers[node.input[2]], np.round(bias / scales).astype(np.int32), scales, tensors
            )
    kept = [t for t in found.graph.initializer if t.name not in tensors]
    del found.graph.initializer[:]
    found.graph.initializer.extend(kept)
    found.graph.initializer.extend(
        numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items()
    )
    del found.graph.value_info[:]
    return ir.from_proto(found)


def _set(dequantize: onnx.NodeProto, integers: Array, scales: Array, tensors: dict) -> None:
    names = [f"{dequantize.output[0]}_{part}" for part in ("integers", "scale", "zero")]
    zeros = np.zeros(len(scales), integers.dtype)
    tensors.update(zip(names, (integers, scales.astype(np.float32), zeros), strict=True))
    dequantize.input[:] = names


def _without_rounding(graph: onnx.ModelProto, layers, weights) -> onnx.ModelProto:
    """Return the graph in float."""
    floats = onnx.ModelProto()
    floats.CopyFrom(graph)
    same: dict[str, str] = {}
    nodes = []
    for node in floats.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            same[node.output[0]] = same.get(node.input[0], node.input[0])
            continue
        node.input[:] = [same.get(name, name) for name in node.input]
        if node.output[0] in layers:
            for i, array in enumerate(weights[layers[node.output[0]]], 1):
                node.input[i] = f"{node.output[0]}_float{i}"
                floats.graph.initializer.append(numpy_helper.from_array(array, node.input[i]))
        nodes.append(node)
    copies = [onnx.NodeProto() for _ in nodes]
    for copy, node in zip(copies, nodes, strict=True):
        copy.CopyFrom(node)
    del floats.graph.node[:]
    floats.graph.node.extend(copies)
    del floats.graph.value_info[:]
    return floats


def _ranges(floats: onnx.ModelProto, names: list[str], samples: Array) -> dict:
    """Return the least and the largest of some values, 0 among them."""
    import onnxruntime

    (given,) = floats.graph.input
    inner = [name for name in names if name != given.name]
    del floats.graph.output[:]
    floats.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        floats.SerializeToString(), options, ["CPUExecutionProvider"]
    )
    values = dict(zip(inner, session.run(inner, {given.name: samples}), strict=True))
    values[given.name] = samples
    return {
        name: (min(0.0, float(v.min())), max(0.0, float(v.max()))) for name, v in values.items()
    }
