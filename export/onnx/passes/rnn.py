"""Recurrent layers with quantized weights in ONNX: integer kernels, or floats made at load time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from compress.export.onnx.graph import INTEGER_LSTM, RECURRENT
from compress.export.onnx.session import onnxruntime, session_options

if TYPE_CHECKING:
    from collections.abc import Iterator

MICROSOFT = "com.microsoft"
LARGEST = 127
"""Largest integer of a row of a symmetric 8-bit weight."""


def lower_quantized_rnns_(model: onnx.ModelProto) -> None:
    """Have onnxruntime run recurrent layers with integer weights fast, in place.

    An LSTM becomes DynamicQuantizeLSTM, which also quantizes the inputs and states of each step.
    GRU and RNN have no integer kernel: their weights become floats while the file is loaded.
    """
    graph = model.graph
    producers = {name: node for node in graph.node for name in node.output}
    for node in [n for n in graph.node if n.op_type in RECURRENT]:
        parts = {p.output[0]: p for name in node.input[1:3] for p in _producing(producers, name)}
        dequantizing = [p for p in parts.values() if p.op_type == "DequantizeLinear"]
        if not dequantizing:
            continue
        # Of DynamicQuantizeLSTM onnxruntime has the default layout alone, time before batch.
        batch_first = any(a.name == "layout" and a.i for a in node.attribute)
        if node.op_type == "LSTM" and not batch_first:
            weights = _evaluate(model, list(parts.values()), list(node.input[1:3]))
            _use_integer_lstm_(graph, node, weights)
        else:
            # onnxruntime never folds a DequantizeLinear while it loads a file, so that it would
            # run in each call; Cast and Mul of constants it folds.
            constants = {t.name: t for t in graph.initializer}
            for part in dequantizing:
                result = part.output[0]
                scale_G1 = numpy_helper.to_array(constants[part.input[1]])[:, None]
                graph.initializer.append(numpy_helper.from_array(scale_G1, f"{result}_scale"))
                floats = helper.make_node("Cast", [part.input[0]], [f"{result}_float"], to=1)
                graph.node.insert(list(graph.node).index(part), floats)
                names = [f"{result}_float", f"{result}_scale"]
                part.CopyFrom(helper.make_node("Mul", names, [result]))
    uses_integers = any(n.op_type == INTEGER_LSTM for n in graph.node)
    if uses_integers and all(opset.domain != MICROSOFT for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))


def _producing(producers: dict[str, onnx.NodeProto], name: str) -> Iterator[onnx.NodeProto]:
    """Yield the operators that a value is computed by."""
    producer = producers.get(name)
    if producer is not None:
        yield producer
        for source in producer.input:
            yield from _producing(producers, source)


def _evaluate(
    model: onnx.ModelProto, parts: list[onnx.NodeProto], names: list[str]
) -> list[np.ndarray[Any, Any]]:
    """Compute values that depend on constants alone, such as weights whose gates are reordered."""
    produced = {name for part in parts for name in part.output}
    nodes = [node for node in model.graph.node if produced & set(node.output)]
    outputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in names]
    read = {name for node in nodes for name in node.input}
    constants = [t for t in model.graph.initializer if t.name in read]
    graph = helper.make_graph(nodes, "weights", [], outputs, constants)
    part = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    session = onnxruntime.InferenceSession(
        part.SerializeToString(), session_options(1), ["CPUExecutionProvider"]
    )
    values: list[np.ndarray[Any, Any]] = session.run(names, {})
    return values


def _use_integer_lstm_(
    graph: onnx.GraphProto, node: onnx.NodeProto, weights: list[np.ndarray[Any, Any]]
) -> None:
    """Replace an LSTM by DynamicQuantizeLSTM, in place."""
    inputs = [*node.input, *[""] * 8][:8]
    for place, weight_DGI in enumerate(weights, start=1):
        scale_DG = np.abs(weight_DGI).max(2) / LARGEST
        scale_DG = np.where(scale_DG == 0, 1, scale_DG).astype(np.float32)
        integers_DGI = np.rint(weight_DGI / scale_DG[..., None]).astype(np.int8)
        constants = {
            "IG": np.ascontiguousarray(integers_DGI.transpose(0, 2, 1)),
            "scale": scale_DG,
            "zero": np.zeros_like(scale_DG, np.int8),
        }
        names = {part: f"{node.output[0]}_{place}_{part}" for part in constants}
        graph.initializer.extend(numpy_helper.from_array(v, names[k]) for k, v in constants.items())
        inputs[place] = names["IG"]
        inputs += [names["scale"], names["zero"]]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    attributes.pop("layout", None)
    node.CopyFrom(
        helper.make_node(INTEGER_LSTM, inputs, node.output, domain=MICROSOFT, **attributes)
    )
