"""Recurrent layers with quantized weights in ONNX: integer kernels, or floats made at load time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from compress.export.onnx.graph import (
    INTEGER_LSTM,
    RECURRENT,
    add_tensor,
    become_,
    inputs_of,
    stored,
)
from compress.export.onnx.session import onnxruntime, session_options

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

MICROSOFT = "com.microsoft"
LARGEST = 127
"""Largest integer of a row of a symmetric 8-bit weight."""


def lower_quantized_rnns_(model: ir.Model) -> None:
    """Have onnxruntime run recurrent layers with integer weights fast, in place.

    An LSTM becomes DynamicQuantizeLSTM, which also quantizes the inputs and states of each step.
    GRU and RNN have no integer kernel: their weights become floats while the file is loaded.
    """
    graph = model.graph
    for node in [n for n in graph if n.op_type in RECURRENT]:
        weights = [value for value in node.inputs[1:3] if value is not None]
        parts = dict.fromkeys(part for value in weights for part in _producing(value))
        dequantizing = [p for p in parts if p.op_type == "DequantizeLinear"]
        if not dequantizing:
            continue
        # Of DynamicQuantizeLSTM onnxruntime has the default layout alone, time before batch.
        if node.op_type == "LSTM" and not node.attributes.get_int("layout"):
            _use_integer_lstm_(graph, node, _evaluate(model, parts, weights))
            model.opset_imports.setdefault(MICROSOFT, 1)
            continue
        # onnxruntime never folds a DequantizeLinear while it loads a file, so that it would
        # run in each call; Cast and Mul of constants it folds.
        for part in dequantizing:
            name, scale = part.outputs[0].name, stored(part.inputs[1])
            assert scale is not None
            scale_G1 = add_tensor(graph, f"{name}_scale", scale.numpy()[:, None])
            floats = ir.Value(name=f"{name}_float")
            cast = ir.node("Cast", part.inputs[:1], {"to": ir.DataType.FLOAT}, outputs=[floats])
            part.prepend(cast)
            become_(part, "Mul", [floats, scale_G1])


def _producing(value: ir.Value) -> Iterator[ir.Node]:
    """Yield the operators that a value is computed by."""
    if (node := value.producer()) is not None:
        yield node
        for source in inputs_of(node):
            yield from _producing(source)


def _evaluate(
    model: ir.Model, parts: Collection[ir.Node], values: Sequence[ir.Value]
) -> list[np.ndarray[Any, Any]]:
    """Compute values that depend on constants alone, such as weights whose gates are reordered."""
    read = dict.fromkeys(value for part in parts for value in inputs_of(part))
    view: Any = ir.GraphView(
        inputs=[],
        outputs=values,
        nodes=[node for node in model.graph if node in parts],
        initializers=[value for value in read if value.is_initializer()],
        opset_imports=model.opset_imports,
        name="weights",
    )
    part = ir.to_proto(ir.Model(view, ir_version=model.ir_version))
    session = onnxruntime.InferenceSession(
        part.SerializeToString(), session_options(1), ["CPUExecutionProvider"]
    )
    arrays: list[np.ndarray[Any, Any]] = session.run(None, {})
    return arrays


def _use_integer_lstm_(graph: ir.Graph, node: ir.Node, weights: list[np.ndarray[Any, Any]]) -> None:
    """Replace an LSTM by DynamicQuantizeLSTM, in place."""
    inputs = [*node.inputs, *[None] * 8][:8]
    for place, weight_DGI in enumerate(weights, start=1):
        scale_DG = np.abs(weight_DGI).max(2) / LARGEST
        scale_DG = np.where(scale_DG == 0, 1, scale_DG).astype(np.float32)
        integers_DGI = np.rint(weight_DGI / scale_DG[..., None]).astype(np.int8)
        name = f"{node.outputs[0].name}_{place}"
        integers_DIG = np.ascontiguousarray(integers_DGI.transpose(0, 2, 1))
        inputs[place] = add_tensor(graph, f"{name}_IG", integers_DIG)
        inputs.append(add_tensor(graph, f"{name}_scale", scale_DG))
        inputs.append(add_tensor(graph, f"{name}_zero", np.zeros_like(scale_DG, np.int8)))
    attributes = {k: v for k, v in sorted(node.attributes.items()) if k != "layout"}
    become_(node, INTEGER_LSTM, inputs, attributes, domain=MICROSOFT)
