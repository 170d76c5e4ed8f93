"""What an ONNX file says beside its graph is in the file that is exported of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import compress
from compress.common.signature import Signature
from compress.core.context import Context
from compress.core.gates.runtime import BaselineArtifact, in_runtime_of
from compress.export.imported.exported_files import import_file, signature_of
from compress.export.onnx.graph import strip_

RNG = np.random.default_rng(0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A convolution and a linear layer, with names as exporters write them."""
    nodes = [
        helper.make_node("Conv", ["x", "conv/kernel:0", "conv/bias:0"], ["c"]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "head/kernel:0"], ["y"]),
    ]
    shapes = {"conv/kernel:0": (8, 3, 3, 3), "conv/bias:0": (8,), "head/kernel:0": (8, 4)}
    weights = [
        numpy_helper.from_array(RNG.normal(size=shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    value = helper.make_tensor_value_info
    x = value("x", TensorProto.FLOAT, ["0.batch", 3, 8, 8])
    y = value("y", TensorProto.FLOAT, ["0.batch", 4])
    graph = helper.make_graph(nodes, "reader of digits", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    model.doc_string = "made of twigs"
    helper.set_model_props(model, {"character": "0\n1\n2\n3"})
    onnx.save(model, tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def _check(exported: onnx.ModelProto) -> None:
    properties = {entry.key: entry.value for entry in exported.metadata_props}
    assert properties["character"] == "0\n1\n2\n3"
    assert (exported.doc_string, exported.graph.name) == ("made of twigs", "reader of digits")
    axes = [v.type.tensor_type.shape.dim[0].dim_param for v in exported.graph.input]
    assert axes == ["0.batch"]
    assert {"conv/kernel:0", "head/kernel:0"} <= {t.name for t in exported.graph.initializer}


def test_names_and_metadata_outlast_import_and_quantization(file: Path, tmp_path: Path) -> None:
    signature = signature_of("onnx", file)
    assert signature is not None
    model = import_file("onnx", file, signature, tmp_path / "model", to_module=True)
    compress.export_onnx(model, tmp_path / "float.onnx")
    _check(onnx.load(tmp_path / "float.onnx"))
    images = [torch.randn(3, 8, 8) for _ in range(8)]
    small = compress.quantize_static(model, data=images)
    compress.export_onnx(small, tmp_path / "int8.onnx")
    exported = onnx.load(tmp_path / "int8.onnx")
    _check(exported)
    kinds = {t.name: t.data_type for t in exported.graph.initializer}
    assert kinds["conv/kernel:0"] == TensorProto.INT8


def test_speeds_are_compared_with_the_file_that_the_model_came_from(
    file: Path, tmp_path: Path
) -> None:
    signature = signature_of("onnx", file)
    assert signature is not None
    model = import_file("onnx", file, signature, tmp_path / "model", to_module=True)
    exported = compress.export_onnx(model, tmp_path / "float.onnx")
    context = Context(root=tmp_path / "root", artifacts={"source": model}, baseline="source")
    # The export of the stage stands for the model where there is no such file.
    assert in_runtime_of(exported, context) is not None
    originals = {"onnx": partial(import_file, "onnx", file, signature)}
    baseline = in_runtime_of(exported, replace(context, originals=originals))
    assert isinstance(baseline, BaselineArtifact)
    operators = [n.op_type for n in onnx.load(baseline.written().payload_path).graph.node]
    assert operators == ["Conv", "Relu", "GlobalAveragePool", "Flatten", "MatMul"]
    again = onnx.load(exported.payload_path)
    assert "Flatten" not in [n.op_type for n in again.graph.node]


def test_a_name_that_two_tensors_or_an_input_would_have_is_not_given() -> None:
    names = ["p", "q", "r", "s"]
    weights = [numpy_helper.from_array(np.ones(3, np.float32), name) for name in names]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy")
    graph = helper.make_graph(
        [helper.make_node("Sum", ["x", *names], ["y"])], "g", [x], [y], weights
    )
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]))
    strip_(model, {"p": "bias", "q": "bias", "r": "a", "s": "x", "absent": "t"})
    assert [*model.graph.initializers] == ["b", "c", "a", "d"]


def test_axes_whose_names_have_one_python_name_stay_apart(tmp_path: Path) -> None:
    values = {"x": ["a b", 4], "w": [4, "a_b"], "y": ["a b", "a_b"]}
    x, w, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in values.items()
    )
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x, w], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "f")
    signature = signature_of("onnx", tmp_path / "f")
    assert signature is not None
    assert [spec.shape for spec in signature.inputs] == [("a_b", 4), (4, "a_b_")]
    model = import_file("onnx", tmp_path / "f", signature, tmp_path / "model", to_module=True)
    compress.export_onnx(model, tmp_path / "again.onnx")
    exported = onnx.load(tmp_path / "again.onnx").graph
    for value in (*exported.input, *exported.output):
        dims = value.type.tensor_type.shape.dim
        assert [dim.dim_param or dim.dim_value for dim in dims] == values[value.name]


def test_an_axis_without_a_name_is_none_of_the_files_named_ones(tmp_path: Path) -> None:
    values = {"x": ["rows", None], "w": ["x_1", 4], "y": ["rows", 4]}
    x, w, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in values.items()
    )
    graph = helper.make_graph([helper.make_node("Gemm", ["x", "w"], ["y"])], "g", [x, w], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / "f")
    signature = signature_of("onnx", tmp_path / "f")
    assert signature is not None
    assert [spec.shape for spec in signature.inputs] == [("rows", "x_1"), ("x_1_", 4)]


@pytest.mark.parametrize("names", [None, ["scores"]])
def test_names_of_outputs_are_the_files_or_given_anew(
    names: list[str] | None, file: Path, tmp_path: Path
) -> None:
    changed = onnx.load(file)
    changed.graph.node[-1].output[0] = changed.graph.output[0].name = "model/scale_0.tmp_1"
    onnx.save(changed, file)
    found = signature_of("onnx", file)
    assert found is not None
    given = {} if names is None else {"outputs": [{"name": name} for name in names]}
    signature = Signature.model_validate({"inputs": found.inputs, **given})
    wanted = names or ["model/scale_0.tmp_1"]
    module = import_file("onnx", file, signature, tmp_path / "model", to_module=True)
    original = import_file("onnx", file, module.signature, tmp_path / "original")
    (x,) = found.example(3)
    with module.open() as predict, original.open() as predict_original:
        torch.testing.assert_close(predict(x)[0], predict_original(x)[0], rtol=1e-4, atol=1e-4)
    exported = compress.export_onnx(module, tmp_path / "again.onnx")
    for artifact in (module, original, exported):
        assert [output.name for output in artifact.signature.outputs] == wanted
    for artifact in (original, exported):
        outputs = onnx.load(artifact.payload_path).graph.output
        assert [value.name for value in outputs] == wanted


def test_a_recurrent_layer_of_a_file_is_quantized_as_any_other(tmp_path: Path) -> None:
    shapes = {"w": (1, 64, 12), "r": (1, 64, 16), "b": (1, 128), "h": (1, 1, 16), "c": (1, 1, 16)}
    rng = np.random.default_rng(0)
    weights = [
        # Larger ones make the steps chaotic, and the rounded state another one.
        numpy_helper.from_array(rng.normal(0, 0.2, shape).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    node = helper.make_node("LSTM", ["x", "w", "r", "b", "", "h", "c"], ["y"], hidden_size=16)
    value = helper.make_tensor_value_info
    x, y = value("x", TensorProto.FLOAT, ["steps", 1, 12]), value("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "g", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "f")
    signature = signature_of("onnx", tmp_path / "f")
    assert signature is not None
    model = import_file("onnx", tmp_path / "f", signature, tmp_path / "model", to_module=True)
    small = compress.quantize_dynamic(model)
    assert small.manifest.facts["quantized_operators"] == {"lstm": 1}
    exported = onnx.load(compress.export_onnx(small, tmp_path / "small.onnx").payload_path)
    assert "DynamicQuantizeLSTM" in [node.op_type for node in exported.graph.node]


def test_a_file_is_read_and_hashed_without_torch(file: Path) -> None:
    # In the process itself, not in a child with limits, whose modules nobody sees.
    code = f"""
import sys
from pathlib import Path
from compress.common.foreign import child_process
from compress.export.imported.exported_files import digest_of, signature_of
child_process._is_child = True
file = Path({str(file)!r})
assert digest_of(file) and signature_of("onnx", file)
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"
