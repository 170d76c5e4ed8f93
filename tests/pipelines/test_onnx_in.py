"""A pipeline that begins with an ONNX file, whose stages need PyTorch."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.signature import TensorSpec
from compress.data.infer_signature import with_values_seen
from compress.data.splits import Splits
from compress.export.imported import exported_files
from compress.export.onnx import proto_io
from compress.graph.from_onnx import registry
from compress.graph.from_onnx.reading import load
from compress.pipelines import Pipeline

DATA = """
import torch

def splits():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 3, 8, 8, generator=generator)
    y = (x.mean((1, 2, 3)) > 0).long()
    return {"train": [*zip(x, y)], "val": [*zip(x[:64], y[:64])]}
"""
PIPELINE = """
version: 1
model: {file: net.onnx}
data: {factory: "onnx_in_data:splits"}
stages:
  - {stage: prune_channels, ratio: 0.5, finetune: {epochs: 1}}
  - {stage: quantize_static, calibration_samples: 32}
  - {stage: export_onnx, gates: [{gate: label_agreement, minimum: 0.5}]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A convolutional network in `net.onnx`, data and a pipeline."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.Hardswish(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 2),
    ).eval()
    shapes = {"input": {0: "batch"}}
    names = {"input_names": ["input"], "output_names": ["scores"], "dynamic_axes": shapes}
    example = (torch.randn(2, 3, 8, 8),)
    torch.onnx.export(net, example, tmp_path / "net.onnx", dynamo=False, **names)
    (tmp_path / "onnx_in_data.py").write_text(DATA)
    (tmp_path / "p.yaml").write_text(PIPELINE)
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_an_onnx_file_is_pruned_quantized_and_exported_again(folder: Path) -> None:
    Pipeline.from_yaml(folder / "p.yaml").run(folder / "out")
    pruned = EagerModel.from_directory(folder / "out" / "artifacts" / "prune_channels")
    assert pruned.parameters() < 16 * 3 * 9 + 16 * 16 * 9
    written = onnx.load(folder / "out" / "artifacts" / "export_onnx" / "model.onnx")
    assert [value.name for value in written.graph.input] == ["input"]
    assert [value.name for value in written.graph.output] == ["scores"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_module_that_differs_from_its_file_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.OPERATORS, "Relu", lambda node, x: x)
    with pytest.raises(ArtifactInvalid, match=r"first at Relu"):
        Pipeline.from_yaml(folder / "p.yaml").run(folder / "out")


def _with_weights_apart(folder: Path, width: int, layers: int) -> int:
    """Write `big.onnx`, products whose weights are in a file beside it; return their bytes."""
    nodes, tensors, place = [], [], 0
    generator = np.random.default_rng(0)
    with (folder / "big.onnx.data").open("wb") as data:
        for number in range(layers):
            weight = generator.standard_normal((width, width), np.float32) * (2 / width) ** 0.5
            data.write(weight.tobytes())
            outside = {"data_location": TensorProto.EXTERNAL, "data_type": TensorProto.FLOAT}
            tensor = TensorProto(name=f"w{number}", dims=weight.shape, **outside)
            where = {"location": data.name.rpartition("/")[2], "offset": place}
            for key, value in {**where, "length": weight.nbytes}.items():
                tensor.external_data.add(key=key, value=str(value))
            tensors.append(tensor)
            place += weight.nbytes
            nodes.append(helper.make_node("MatMul", [f"x{number}", f"w{number}"], [f"p{number}"]))
            nodes.append(helper.make_node("Relu", [f"p{number}"], [f"x{number + 1}"]))
    ends = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width])
        for name in ("x0", f"x{layers}")
    ]
    graph = helper.make_graph(nodes, "big", ends[:1], ends[1:], tensors)
    opset = [helper.make_opsetid("", 17)]
    (folder / "big.onnx").write_bytes(
        helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    )
    return place


IMPORT = """
import sys
from pathlib import Path
from compress.export.imported.exported_files import import_file, signature_of
file, path, to_module = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "module"
import_file("onnx", file, signature_of("onnx", file), path, to_module=to_module)
"""


def test_a_model_beyond_protobufs_limit_is_taken_in_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_weights_apart(tmp_path, 16, 3)
    monkeypatch.setattr(proto_io, "LARGEST", 1000)
    file, x = tmp_path / "big.onnx", torch.randn(2, 16)
    signature = exported_files.signature_of("onnx", file)
    assert signature is not None
    model = exported_files.import_file("onnx", file, signature, tmp_path / "model")
    with exported_files.opened_artifact(file) as small, small.open() as expected:
        wanted = expected(x)
    (tmp_path / "big.onnx.data").unlink()
    assert {"model.onnx", "model.onnx.data"} <= model.manifest.files.keys()
    with model.open() as predict:
        assert torch.equal(predict(x)[0], wanted[0])


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["module", "onnx"])
def test_a_file_of_2_gigabytes_is_imported_in_little_more_memory(tmp_path: Path, kind: str) -> None:
    size = _with_weights_apart(tmp_path, 4096, 33)
    command = [sys.executable, "-c", IMPORT, tmp_path / "big.onnx", tmp_path / "out", kind]
    largest = 0
    with subprocess.Popen([str(part) for part in command]) as process:
        while process.poll() is None:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            for number in [process.pid, *children.read_text().split()]:
                status = Path(f"/proc/{number}/status").read_text()
                _, found, after = status.partition("RssAnon:")
                largest = max(largest, int(after.split()[0]) * 1024 if found else 0)
            time.sleep(0.05)
    assert process.returncode == 0
    # Pages of the file itself, which the system takes back at any time, are not counted.
    assert size > 2**31 and largest < 1.3 * size


@pytest.mark.parametrize("to_module", [False, True])
def test_all_inputs_of_a_file_are_declared(tmp_path: Path, to_module: bool) -> None:
    x, state, y = (helper.make_tensor_value_info(n, 1, ["n", 4]) for n in ("x", "state", "y"))
    add = helper.make_node("Add", ["x", "state"], ["y"])
    graph = helper.make_graph([add], "g", [x, state], [y])
    onnx.save(helper.make_model(graph), file := tmp_path / "m.onnx")
    signature = exported_files.signature_of("onnx", file)
    assert signature is not None
    partial = signature.model_copy(update={"inputs": signature.inputs[:1]})
    with pytest.raises(PipelineInvalid, match=r"has \['x', 'state'\], found \['x'\]$"):
        exported_files.import_file("onnx", file, partial, tmp_path / "a", to_module=to_module)


def test_rows_of_a_state_lie_along_another_axis(tmp_path: Path) -> None:
    x, state, y = (
        helper.make_tensor_value_info(name, 1, shape)
        for name, shape in {"x": ["n", 4], "state": [2, "n", 4], "y": ["n", 4]}.items()
    )
    first = helper.make_tensor("first", TensorProto.INT64, [], [0])
    nodes = [
        helper.make_node("Gather", ["state", "first"], ["hidden"], axis=0),
        helper.make_node("Concat", ["x", "hidden"], ["joined"], axis=1),
        helper.make_node("Gather", ["joined", "kept"], ["y"], axis=1),
    ]
    kept = helper.make_tensor("kept", TensorProto.INT64, [4], [0, 2, 4, 6])
    graph = helper.make_graph(nodes, "g", [x, state], [y], [first, kept])
    onnx.save(helper.make_model(graph), file := tmp_path / "m.onnx")
    signature = exported_files.signature_of("onnx", file)
    assert signature is not None and signature.batch_axis == "n"
    imported = exported_files.import_file("onnx", file, signature, tmp_path / "a", to_module=True)
    with imported.open() as predict:
        (found,) = predict(torch.ones(3, 4), torch.zeros(2, 3, 4))
    assert found.tolist() == [[1, 1, 0, 0]] * 3


def test_samples_have_all_inputs_that_a_file_takes() -> None:
    inputs = tuple(TensorSpec(name=name, shape=("batch", 4)) for name in ("x", "state"))
    splits = Splits({"val": [torch.zeros(4)] * 3})
    message = r"takes 2 inputs, x \[batch, 4\] float32, state .* and a sample has 1: \[4\]$"
    with pytest.raises(PipelineInvalid, match=message):
        with_values_seen(inputs, splits)
    assert with_values_seen(inputs[:1], splits)[0].shape == ("batch", 4)


@pytest.mark.filterwarnings("ignore")
def test_a_module_of_a_file_names_its_inputs(folder: Path) -> None:
    module = load(folder / "net.onnx")
    with pytest.raises(TypeError, match=r"^expected 1 inputs \(\w+\), found 2$"):
        module(torch.zeros(1), torch.zeros(1))
