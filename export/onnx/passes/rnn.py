"""Recurrent layers with rounded weights in ONNX: integer kernels, or floats made while loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

if TYPE_CHECKING:
    from collections.abc import Iterator

RECURRENT = {"LSTM", "GRU", "RNN"}
INTEGER_LSTM = "DynamicQuantizeLSTM"
MICROSOFT = "com.microsoft"
LARGEST = 127
"""Largest integer of a row of a symmetric 8-bit weight."""


def compute_recurrences_(model: onnx.ModelProto) -> None:
    """Let onnxruntime compute recurrent layers fast whose weights are integers, in place.

    An LSTM becomes DynamicQuantizeLSTM, which also rounds the inputs and states of each step. GRU
    and RNN have no integer kernel: their weights become floats while the file is loaded, and not
    in each call, as a DequantizeLinear would have it.
    """
    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    for node in [n for n in graph.node if n.op_type in RECURRENT]:
        parts = {p.output[0]: p for name in node.input[1:3] for p in _made_of(makers, name)}
        dequantizing = [p for p in parts.values() if p.op_type == "DequantizeLinear"]
        if not dequantizing:
            continue
        if node.op_type == "LSTM" and not _layout(node):
            floats = _evaluated(model, list(parts.values()), list(node.input[1:3]))
            _use_integers_(graph, node, floats)
        else:
            for part in dequantizing:
                _make_floats_at_load_(graph, part)
    if any(n.op_type == INTEGER_LSTM for n in graph.node):
        _import_domain_(model)


def _made_of(makers: dict[str, onnx.NodeProto], name: str) -> Iterator[onnx.NodeProto]:
    """Yield the operators that make a value."""
    maker = makers.get(name)
    if maker is not None:
        yield maker
        for source in maker.input:
            yield from _made_of(makers, source)


def _layout(node: onnx.NodeProto) -> int:
    return next((a.i for a in node.attribute if a.name == "layout"), 0)


def _evaluated(
    model: onnx.ModelProto, parts: list[onnx.NodeProto], names: list[str]
) -> list[np.ndarray[Any, Any]]:
    """Return values that are made of constants alone: gates are reordered on the way."""
    made = {name for part in parts for name in part.output}
    nodes = [node for node in model.graph.node if made & set(node.output)]
    outputs = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in names]
    read = {name for node in nodes for name in node.input}
    constants = [t for t in model.graph.initializer if t.name in read]
    graph = helper.make_graph(nodes, "weights", [], outputs, constants)
    part = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        part.SerializeToString(), options, ["CPUExecutionProvider"]
    )
    values: list[np.ndarray[Any, Any]] = session.run(names, {})
    return values


def _use_integers_(
    graph: onnx.GraphProto, node: onnx.NodeProto, floats: list[np.ndarray[Any, Any]]
) -> None:
    """Replace an LSTM by the one that multiplies integers, in place."""
    inputs = [*node.input, *[""] * 8][:8]
    for place, weight_DGI in enumerate(floats, start=1):
        scale_DG = np.abs(weight_DGI).max(2) / LARGEST
        scale_DG = np.where(scale_DG == 0, 1, scale_DG).astype(np.float32)
        integers_DGI = np.rint(weight_DGI / scale_DG[..., None]).astype(np.int8)
        held = {
            "IG": np.ascontiguousarray(integers_DGI.transpose(0, 2, 1)),
            "scale": scale_DG,
            "zero": np.zeros_like(scale_DG, np.int8),
        }
        names = {part: f"{node.output[0]}_{place}_{part}" for part in held}
        graph.initializer.extend(numpy_helper.from_array(v, names[k]) for k, v in held.items())
        inputs[place] = names["IG"]
        inputs += [names["scale"], names["zero"]]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    attributes.pop("layout", None)
    made = helper.make_node(INTEGER_LSTM, inputs, node.output, domain=MICROSOFT, **attributes)
    node.CopyFrom(made)


def _make_floats_at_load_(graph: onnx.GraphProto, node: onnx.NodeProto) -> None:
    """Replace a DequantizeLinear of rows, which onnxruntime never folds, by what it does fold."""
    constants = {t.name: t for t in graph.initializer}
    scale_G1 = numpy_helper.to_array(constants[node.input[1]])[:, None]
    result = node.output[0]
    graph.initializer.append(numpy_helper.from_array(scale_G1, f"{result}_scale"))
    floats = helper.make_node("Cast", [node.input[0]], [f"{result}_float"], to=1)
    graph.node.insert(list(graph.node).index(node), floats)
    node.CopyFrom(helper.make_node("Mul", [f"{result}_float", f"{result}_scale"], [result]))


def _import_domain_(model: onnx.ModelProto) -> None:
    if all(known.domain != MICROSOFT for known in model.opset_import):
        model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
