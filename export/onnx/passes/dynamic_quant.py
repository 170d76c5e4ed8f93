"""Ranges found at run time, in ONNX: MatMulInteger for products, DynamicQuantizeLSTM for LSTMs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch
import torch.ao.quantization.fx._decomposed  # registers quantize_per_tensor and its kin
from onnxscript import opset18 as op

from compress.common.forward import accept_any_batch
from compress.common.tensor_difference import relative_error
from compress.export.onnx.graph import (
    INTEGER_LSTM,
    RECURRENT,
    add_tensor,
    become_,
    inputs_of,
    producer,
    remove_unread_,
    stored,
)
from compress.export.onnx.proto_io import write
from compress.export.onnx.session import onnxruntime, session_options, session_predictor

if TYPE_CHECKING:
    from compress.common.forward import Tensors
    from compress.common.signature import Signature

quantized = torch.ops.quantized_decomposed
ROW_ZERO_POINT = np.array(128, np.uint8)
"""Signed integers are stored as unsigned ones around 128, which x86 multiplies by signed weights in
one instruction: onnxruntime has no fast kernel for signed activations."""


def _choose_qparams(x: Any, _low: int, _high: int, _eps: float, _dtype: int) -> tuple[Any, Any]:
    _, scale, zero_point = op.DynamicQuantizeLinear(x)
    return scale, zero_point


def _quantize(x: Any, scale: Any, zero_point: Any, _low: int, _high: int, _dtype: int) -> Any:
    return op.QuantizeLinear(x, scale, zero_point)


def _dequantize(x: Any, scale: Any, zero_point: Any, _low: int, _high: int, _dtype: int) -> Any:
    return op.DequantizeLinear(x, scale, zero_point)


def _identity_qparams() -> tuple[Any, Any]:
    zero: Any = ir.tensor(np.zeros((), np.int8))
    return op.Constant(value_float=1.0), op.Constant(value=zero)


def _quantize_rows(x: Any, scale: Any, _zero_point: Any, _low: int, _high: int, _dtype: int) -> Any:
    one, zero = _identity_qparams()
    return op.QuantizeLinear(op.Mul(x, op.Reciprocal(scale)), one, zero)


def _dequantize_rows(
    x: Any, scale: Any, _zero_point: Any, _low: int, _high: int, _dtype: int, _floats: int
) -> Any:
    one, zero = _identity_qparams()
    return op.Mul(op.DequantizeLinear(x, one, zero), scale)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    quantized.choose_qparams.tensor: _choose_qparams,
    quantized.quantize_per_tensor.tensor: _quantize,
    quantized.dequantize_per_tensor.tensor: _dequantize,
    quantized.quantize_per_token.default: _quantize_rows,
    quantized.dequantize_per_token.default: _dequantize_rows,
}
"""Operators on ranges found at run time, which torch's exporter has no form for."""


def fuse_integer_products_(model: ir.Model) -> None:
    """Turn products of dequantized activations and weights into MatMulInteger, in place."""
    # onnxruntime fuses fixed ranges by itself; of those found at run time it fuses only what its
    # own quantizer writes: MatMulInteger, Cast, Mul.
    rounded: dict[ir.Value, ir.Value] = {}  # values that are rounded by rows → their integers
    for ranges in model.graph:
        if ranges.op_type == "DynamicQuantizeLinear":
            for value in ranges.outputs[1:]:
                value.type = value.shape = None  # torch's: double and int64, of one element
    for node in [n for n in model.graph if n.op_type in ("MatMul", "Gemm")]:
        _fuse_product_(model.graph, node, rounded)
    remove_unread_(model)


def _fuse_product_(graph: ir.Graph, product: ir.Node, rounded: dict[ir.Value, ir.Value]) -> None:
    features, (result,) = product.inputs[0], product.outputs
    per_tensor, per_row = _dynamic_range(features), _row_quantized(features)
    weight = _quantized_weight(product) if per_tensor or per_row else None
    if weight is None:
        return
    nodes: list[ir.Node] = []

    def add(operator: str, inputs: Sequence[ir.Value | None], part: str, **named: Any) -> Any:
        value = ir.Value(name=f"{result.name}_{part}")
        nodes.append(ir.node(operator, inputs, named, outputs=[value]))
        return value

    def constant(name: str, value: np.ndarray[Any, Any]) -> ir.Value:
        known = graph.initializers.get(name)  # several products may read it
        return add_tensor(graph, name, value) if known is None else known

    integers_IO, scale_O = (constant(key, array) for key, array in weight.items())
    if per_tensor is not None:
        integers, scale, zero_point = per_tensor.outputs
    elif per_row is not None:
        values, scale = per_row
        zero_point = constant("row_zero_point", ROW_ZERO_POINT)
        if values not in rounded:
            one = constant("row_one", np.array(1, np.float32))
            rounded[values] = add("QuantizeLinear", [values, one, zero_point], "integers")
        integers = rounded[values]
    sums = add("MatMulInteger", [integers, integers_IO, zero_point], "sum")
    floats = add("Cast", [sums], "float", to=ir.DataType.FLOAT)
    if per_tensor is not None:
        last = add("Mul", [floats, add("Mul", [scale, scale_O], "scale")], "scaled")
    else:  # the products of both scales would be as large as the result
        last = add("Mul", [add("Mul", [floats, scale], "scale"), scale_O], "scaled")
    if len(product.inputs) > 2:
        last = add("Add", [last, product.inputs[2]], "biased")
    ir.convenience.replace_nodes_and_values(graph, product, [product], nodes, [result], [last])


def _dynamic_range(value: ir.Value | None) -> ir.Node | None:
    """Return the DynamicQuantizeLinear whose integers a value is, dequantized."""
    dequantize = producer(value, "DequantizeLinear")
    if dequantize is None:
        return None
    quantize = producer(dequantize.inputs[0], "QuantizeLinear")
    ranges = producer(dequantize.inputs[1], "DynamicQuantizeLinear")
    if quantize is None or ranges is None or quantize.inputs[0] is not ranges.inputs[0]:
        return None
    return ranges if quantize.inputs[1] is dequantize.inputs[1] else None


def _row_quantized(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Return the value that was quantized with a scale for each row, and the scales."""
    # The form of _quantize_rows followed by _dequantize_rows.
    scaled = producer(value, "Mul")
    dequantize = producer(scaled.inputs[0], "DequantizeLinear") if scaled else None
    quantize = producer(dequantize.inputs[0], "QuantizeLinear") if dequantize else None
    if scaled is None or dequantize is None or quantize is None:
        return None
    divided, scale = producer(quantize.inputs[0]), scaled.inputs[1]
    if quantize.inputs[1:] != dequantize.inputs[1:] or divided is None or len(divided.inputs) < 2:
        return None
    inverse = producer(divided.inputs[1], "Reciprocal")
    values = quantize.inputs[0]
    if inverse is None or inverse.inputs[0] is not scale or scale is None or values is None:
        return None
    return values, scale


def _quantized_weight(product: ir.Node) -> dict[str, np.ndarray[Any, Any]] | None:
    """Return a product's integer weight, inputs by outputs, and the outputs' scales, by name."""
    attributes, is_OI = product.attributes, False
    if product.op_type == "Gemm":
        plain = all(attributes.get_float(k, 1.0) == 1.0 for k in ("alpha", "beta"))
        if attributes.get_int("transA") or not plain:
            return None
        is_OI = bool(attributes.get_int("transB"))
    node = producer(product.inputs[1])
    if node is not None and node.op_type == "Transpose":
        is_OI, node = not is_OI, producer(node.inputs[0])
    if node is None or node.op_type != "DequantizeLinear":
        return None
    tensor, scale, *zero_points = map(stored, node.inputs)
    symmetric = not any(zero is not None and zero.numpy().any() for zero in zero_points)
    if tensor is None or scale is None or len(tensor.shape) != 2 or not symmetric:
        return None
    integers, scale_O = tensor.numpy(), scale.numpy().astype(np.float32)
    if scale_O.size not in (1, integers.shape[0 if is_OI else 1]):
        return None
    weight_IO = np.ascontiguousarray(integers.T if is_OI else integers)
    return {f"{tensor.name}_IO": weight_IO, f"{scale.name}_O": scale_O}


MICROSOFT = "com.microsoft"
COARSE = 0.05
"""Error of an integer LSTM, as a share of its outputs' norm, from which it is computed in float:
others have 0.01 to 0.02, and a whole file may have 0.1."""
LARGEST = 127  # largest integer of a row of a symmetric 8-bit weight


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
            inputs = [*node.inputs, *[None] * 8][:8]
            for place, weight_DGI in enumerate(_evaluate(model, weights), start=1):
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
            model.opset_imports.setdefault(MICROSOFT, 1)
            continue
        # onnxruntime never folds a DequantizeLinear while it loads a file, so that it would
        # run in each call; Cast and Mul of constants it folds.
        for part in dequantizing:
            stem, scale = part.outputs[0].name, stored(part.inputs[1])
            assert scale is not None
            scale_G1 = add_tensor(graph, f"{stem}_scale", scale.numpy()[:, None])
            floats = ir.Value(name=f"{stem}_float")
            cast = ir.node("Cast", part.inputs[:1], {"to": ir.DataType.FLOAT}, outputs=[floats])
            part.prepend(cast)
            become_(part, "Mul", [floats, scale_G1])


def compute_coarse_lstms_in_float_(
    model: ir.Model, signature: Signature, batches: Iterator[Tensors], threads: int
) -> list[tuple[str, float]]:
    """Have onnxruntime compute LSTMs in float, in place, whose inputs its integers are too few for.

    A call has one scale for all features and steps, which loses what is small: of a spectrogram's
    powers, most. The weights stay integers, and become floats while the file is loaded. Return the
    layers' names, and their integer kernel's error on the first batch of inputs, as a share of the
    outputs' norm.
    """
    lstms = [node for node in model.graph if node.op_type == INTEGER_LSTM]
    inputs = next(batches, None) if lstms else None
    if inputs is None:
        return []
    # Both kernels read the same numbers, those of the float ones before them.
    trial, outputs = model.clone(), list[ir.Value]()
    for node in [node for node in trial.graph if node.op_type == INTEGER_LSTM]:
        integer = ir.node(INTEGER_LSTM, node.inputs, node.attributes, domain=node.domain)
        _use_float_kernel_(trial.graph, node)
        single = ir.node("LSTM", node.inputs, node.attributes)
        node.append([integer, single])
        outputs += [*integer.outputs, *single.outputs]
    trial.graph.outputs[:] = outputs
    for value in outputs:
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape([None] * 4)
    remove_unread_(trial)
    with tempfile.TemporaryDirectory(prefix="compress-lstm-") as folder:
        write(trial, file := Path(folder) / "lstms.onnx")
        predict = session_predictor(file, threads)

        def errors_of(*batch: torch.Tensor) -> Tensors:
            answers = predict(*batch)
            return (torch.tensor([[*map(relative_error, answers[1::2], answers[::2])]]),)

        (errors,) = accept_any_batch(errors_of, signature)(*inputs)
    largest = errors.max(0).values.tolist()
    coarse = [(i, error) for i, error in enumerate(largest) if not error <= COARSE]
    for i, _ in coarse:
        _use_float_kernel_(model.graph, lstms[i])
    remove_unread_(model)  # scales of another shape
    return [(f"LSTM {i + 1} of {len(lstms)}", error) for i, error in coarse]


def _use_float_kernel_(graph: ir.Graph, lstm: ir.Node) -> None:
    """Turn a DynamicQuantizeLSTM into an LSTM of the same integer weights."""
    inputs = [*lstm.inputs[:8]]
    for place in (1, 2):
        scale_DG = stored(lstm.inputs[6 + 2 * place])
        assert scale_DG is not None
        name = f"{lstm.outputs[0].name}_{place}"
        scale_D1G = add_tensor(graph, f"{name}_scale_D1G", scale_DG.numpy()[:, None])
        # onnxruntime folds these while it loads the file.
        cast = ir.node("Cast", inputs[place : place + 1], {"to": ir.DataType.FLOAT})
        scaled = ir.node("Mul", [cast.outputs[0], scale_D1G])
        turned = ir.node("Transpose", scaled.outputs, {"perm": [0, 2, 1]})
        lstm.prepend([cast, scaled, turned])
        inputs[place] = turned.outputs[0]
        for part, node in zip(("float", "scaled", "DGI"), (cast, scaled, turned), strict=True):
            node.outputs[0].name = f"{name}_{part}"
    become_(lstm, "LSTM", inputs, {**lstm.attributes})


def _producing(value: ir.Value) -> Iterator[ir.Node]:
    if (node := value.producer()) is not None:
        yield node
        for source in inputs_of(node):
            yield from _producing(source)


def _evaluate(model: ir.Model, values: Sequence[ir.Value]) -> list[np.ndarray[Any, Any]]:
    """Compute values that depend on constants alone, such as weights whose gates are reordered."""
    graph = ir.convenience.extract(model.graph, [], values)
    content = ir.to_proto(ir.Model(graph, ir_version=model.ir_version)).SerializeToString()
    session = onnxruntime.InferenceSession(content, session_options(1), ["CPUExecutionProvider"])
    return session.run(None, {})  # type: ignore[no-any-return]
