"""ONNX's own tests of its operators: each is right, or refused; none is wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto
from onnx.backend.test.loader import load_model_tests
from onnxruntime import InferenceSession

from compress.common.errors import ArtifactInvalid
from compress.graph.from_onnx.reading import module_of, simplify
from compress.graph.from_onnx.registry import Unsupported
from compress.graph.from_onnx.shape_tensor import from_numpy

FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16}
WHOLE = {1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16}  # without types of 8 bits and fewer, and texts
RIGHT = 0.95  # of those that compute with floats
ROUNDING = {TensorProto.FLOAT16: 2e-3, TensorProto.BFLOAT16: 1.6e-2}


def _is_float(model: onnx.ModelProto) -> bool:
    values = [*model.graph.input, *model.graph.output]
    if any(value.type.WhichOneof("value") != "tensor_type" for value in values):
        return False
    kinds = {value.type.tensor_type.elem_type for value in values}
    return kinds <= WHOLE and bool(kinds & FLOATS)


def _tensor(value: Any) -> torch.Tensor:
    return from_numpy(
        onnx.numpy_helper.to_array(value) if isinstance(value, TensorProto) else value
    )


def _cases() -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, about the values that the tests are made of
        yield from load_model_tests(kind="node")


def _problem(case: Any) -> str:
    """Return why a case is refused, or raise AssertionError where an answer is wrong."""
    try:
        module = module_of(simplify(ir.from_proto(case.model), case.name))
        for given, expected in case.data_sets:
            with torch.no_grad():
                found = module(*map(_tensor, given)).values()
            for ours, theirs in zip(found, map(_tensor, expected), strict=False):
                assert ours.dtype == theirs.dtype, case.name
                kind = case.model.graph.output[0].type.tensor_type.elem_type
                rtol = max(case.rtol, ROUNDING.get(kind, 0))
                if theirs.is_floating_point():
                    ours, theirs = ours.double(), theirs.double()
                np.testing.assert_allclose(ours, theirs, rtol, 1e-6, err_msg=case.name)
    except (ArtifactInvalid, Unsupported) as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_operators_of_onnx_are_right_or_refused() -> None:
    refused = {case.name: _problem(case) for case in _cases() if _is_float(case.model)}
    reasons = {name: reason for name, reason in refused.items() if reason}
    assert len(refused) > 1400
    assert 1 - len(reasons) / len(refused) >= RIGHT, reasons


def test_an_operator_without_an_equivalent_is_refused_with_all_of_its_kind() -> None:
    nodes = [
        onnx.helper.make_node("Foo", ["x"], ["a"], name="first", domain="mine"),
        onnx.helper.make_node("Foo", ["a"], ["b"], name="second", domain="mine"),
        onnx.helper.make_node("RoiAlign", ["b", "r", "i"], ["y"], name="third"),
    ]
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [value("x", 1, [1, 1, 4, 4]), value("r", 1, [1, 4]), value("i", 7, [1])],
        [value("y", 1, None)],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("mine", 1)]
    )
    with pytest.raises(
        ArtifactInvalid,
        match=r"net\.onnx: .*RoiAlign \(1: third\), mine\.Foo \(2: first, second\)",
    ):
        simplify(ir.from_proto(model), "net.onnx")


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_layers_end_where_the_length_of_a_row_says(
    kind: str, gates: int, direction: str
) -> None:
    ways, size = 2 if direction == "bidirectional" else 1, 4
    draw = np.random.default_rng(0).standard_normal
    shapes = {"w": (ways, gates * size, 3), "r": (ways, gates * size, size), "h": (ways, 3, size)}
    weights = [
        onnx.numpy_helper.from_array(draw(shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    names = ["y", "last", "cell"][: 3 if kind == "LSTM" else 2]
    node = onnx.helper.make_node(
        kind, ["x", "w", "r", "", "n", "h"], names, hidden_size=size, direction=direction
    )
    value = onnx.helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, [5, 3, 3]), value("n", TensorProto.INT32, [3])]
    outputs = [value(name, TensorProto.FLOAT, None) for name in names]
    graph = onnx.helper.make_graph([node], "graph", inputs, outputs, weights)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    x, lengths = draw((5, 3, 3)).astype(np.float32), np.array([5, 1, 3], np.int32)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(names, {"x": x, "n": lengths})
    module = module_of(simplify(ir.from_proto(model), kind))
    found = module(*map(torch.from_numpy, (x, lengths))).values()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours.detach(), theirs, 1e-5, 1e-6)
