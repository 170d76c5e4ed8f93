"""Engines that TensorRT for RTX builds ahead of time, for GPUs that are not here."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from pydantic import ValidationError

from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import StageFailed, Unavailable
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import LabelAgreement, MaxFileSize, MaxLatency
from compress.core.gates.runtime import BaselineArtifact, in_runtime_of
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.export.tensorrt import runtime
from compress.export.tensorrt.runtime import (
    BuildOptions,
    not_run_reason,
    parse_and_build,
    refuse_other_host,
    write_onnx,
)
from compress.export.tensorrt.stage import ExportTensorRT, TensorRTEngine
from compress.pipelines import Pipeline
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.reporting.stage_rows import headline
from compress.quantization.stages.static import QuantizeStatic
from tests.export.builders import images, network_of, samples

RTX = "tensorrt_rtx_bindings"
INSTALLED = importlib.util.find_spec(RTX) is not None
needs_rtx = pytest.mark.skipif(not INSTALLED, reason="no TensorRT for RTX (extra tensorrt-rtx)")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU may run the engines")

GPUS = ("sm86", "sm89", "sm120")
WORDS = Signature(
    inputs=(TensorSpec(name="words", shape=("batch", 5), dtype="int64"),),
    outputs=(OutputSpec(name="logits"),),
)
TAGGER = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 3)

    def forward(self, words):
        words = self.words(words)
        return self.head(words.mean(1)) + self.head(words.amax(1))
"""
PADDED = """
import torch.nn.functional as F
from torch import nn

class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, stride=2), nn.Conv2d(4, 8, 3)

    def forward(self, image):
        return self.second(F.relu6(self.first(F.pad(image, (0, 1, 0, 1))))).mean((2, 3))
"""
PIPELINE = """
version: 1
model: {{factory: 'nets:Net', checkpoint: x.pt, inputs: [{{name: image, shape: [batch, 1, 8, 8]}}]}}
stages: {stages}
"""
NETS = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
"""
DATA = """
import torch

def splits():
    x, y = torch.randn(96, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(96)
    rows = list(zip(x, y % 10))
    return {"train": rows[:64], "val": rows[64:80], "test": rows[80:]}
"""


def pipeline(folder: Path, stages: str, more: str = "") -> Pipeline:
    (folder / "nets.py").write_text(NETS)
    file = folder / "pipeline.yaml"
    file.write_text(PIPELINE.format(stages=stages) + more)
    return Pipeline.from_yaml(file)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"through": "torch_tensorrt"}, "through is for the GPU of this host"),
        ({"cache": "engines"}, "cache is for the GPU of this host"),
        ({"compute_capabilities": ("sm90",)}, "'sm120' or 'sm121'"),
    ],
)
def test_settings_that_no_portable_engine_has_are_refused(settings, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ExportTensorRT.model_validate({"compute_capabilities": GPUS, **settings})


def test_a_plan_is_refused_without_the_library_and_not_for_want_of_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, RTX, None)
    stages = "[{stage: export_tensorrt, compute_capabilities: [sm86]}]"
    with pytest.raises(Unavailable, match=rf"needs {RTX}, .*\[tensorrt-rtx\]") as caught:
        build_plan(pipeline(tmp_path, stages))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "stages",
    [
        "[{stage: export_tensorrt, compute_capabilities: [sm86], gates: [GATE]}]",
        "[{stage: export_tensorrt, name: engine, compute_capabilities: [sm86]},"
        " {stage: export_torchscript, input: source, gates: [AGAINST]}]",
    ],
)
@pytest.mark.parametrize("gate", ["gate: parity, atol: 0.1", "gate: max_latency, p95_ms: 9"])
def test_a_gate_that_must_call_the_engine_is_refused_before_the_run(
    tmp_path: Path, stages: str, gate: str
) -> None:
    if "AGAINST" in stages and "latency" in gate:
        gate = "gate: min_speedup, ratio: 1"
    stages = stages.replace("GATE", f"{{{gate}}}")
    stages = stages.replace("AGAINST", f"{{{gate}, against: engine}}")
    place = r"gates\[0\] \(\w+\): calls the result of (engine|export_tensorrt), which is built for "
    with pytest.raises(Unavailable, match=f"{place}sm86 .* no CUDA device here; leave the gate"):
        build_plan(pipeline(tmp_path, stages))


def test_such_a_gate_is_refused_in_python_too(model: EagerModel, tmp_path: Path) -> None:
    for gate in (MaxLatency(p95_ms=9), LabelAgreement(minimum=1)):
        stage = ExportTensorRT(compute_capabilities=GPUS, gates=(gate,))
        with pytest.raises(Unavailable, match="calls the result of export_tensorrt"):
            stage(model, Context(root=tmp_path / "engine"))
    assert not (tmp_path / "engine").exists()


def test_an_engine_is_for_some_gpus_and_one_version(monkeypatch, tmp_path: Path) -> None:
    class Library:
        __version__ = "1.7.1.116"

    needed = {"compute_capabilities": GPUS, "tensorrt_rtx": "1.7.1.116"}
    monkeypatch.setattr(runtime, "bindings", lambda portable: Library)
    assert not_run_reason(GPUS).endswith("not run: there is no CUDA device here")
    with pytest.raises(Unavailable, match=r"built for sm86, sm89, .* no CUDA device"):
        refuse_other_host(needed, tmp_path, "cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert not_run_reason(GPUS).endswith("not run: the GPU here is sm90")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    assert not_run_reason(GPUS) == ""
    refuse_other_host(needed, tmp_path, "cuda:0")
    Library.__version__ = "1.8.0.1"
    with pytest.raises(Unavailable, match=r"built with TensorRT for RTX 1\.7\.1\.116, found 1\.8"):
        refuse_other_host(needed, tmp_path, "cuda:0")


def test_nothing_but_dequantize_linear_reads_8_bit_constants(tmp_path: Path) -> None:
    source = network_of(tmp_path, TAGGER, "tagger:Tagger", WORDS)
    words = torch.arange(80).reshape(16, 5) % 50
    context = Context(root=tmp_path / "int8", data=samples(words))
    quantized = QuantizeStatic(target="tensorrt", calibration_samples=16)(source, context)
    write_onnx(quantized.program(), WORDS, tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    stored = {t.name for t in graph.initializer if t.data_type == TensorProto.INT8 and t.dims}
    assert len(stored) >= 2
    readers = {node.op_type for node in graph.node if stored & {*node.input}}
    assert readers == {"DequantizeLinear"}
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {"words": words.numpy()})
    with quantized.open() as predict:
        np.testing.assert_allclose(found, predict(words)[0].numpy(), atol=1e-5)


def test_a_pad_before_an_integer_convolution_is_valid(tmp_path: Path) -> None:
    """As MobileNetV2 of transformers pads: more on one side than on the other."""
    image = Signature(
        inputs=(TensorSpec(name="image", shape=("batch", 1, 8, 8)),),
        outputs=(OutputSpec(name="logits"),),
    )
    source = network_of(tmp_path, PADDED, "padded:Padded", image)
    pictures = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    context = Context(root=tmp_path / "int8", data=samples(pictures))
    quantized = QuantizeStatic(target="tensorrt", calibration_samples=16)(source, context)
    write_onnx(quantized.program(), image, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (found,) = session.run(None, {"image": pictures.numpy()})
    with quantized.open() as predict:
        np.testing.assert_allclose(found, predict(pictures)[0].numpy(), atol=1e-5)


def onnx_file(folder: Path, nodes, weights) -> Path:
    """Write a model of 4 inputs whose nodes make `y`."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "model",
        [value("x", TensorProto.FLOAT, [1, 4])],
        [value("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = helper.make_opsetid("", 18)
    onnx.save(helper.make_model(graph, opset_imports=[opset]), folder / "model.onnx")
    return folder / "model.onnx"


SHAPES = {"x": ((1, 4),) * 3}
OPTIONS = BuildOptions(compute_capabilities=GPUS)


@needs_rtx
def test_a_refused_node_is_named(tmp_path: Path) -> None:
    nodes = [helper.make_node("DequantizeLinear", ["bias", "scale"], ["y"], name="layer.bias")]
    weights = {"bias": np.zeros(4, np.int32), "scale": np.ones((), np.float32)}
    with pytest.raises(StageFailed, match=r"at DequantizeLinear layer\.bias: .*Int32") as caught:
        parse_and_build(onnx_file(tmp_path, nodes, weights), SHAPES, OPTIONS)
    assert "driver" not in str(caught.value)


@needs_rtx
def test_a_quantized_model_without_integer_layers_is_refused(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        helper.make_node("MatMul", ["d", "weight"], ["y"]),
    ]
    weights = {
        "scale": np.full((), 0.1, np.float32),
        "zero": np.zeros((), np.int8),
        "weight": np.ones((4, 2), np.float32),
    }
    with pytest.raises(StageFailed, match=r"none of its 1 convolutions .* target: tensorrt"):
        parse_and_build(onnx_file(tmp_path, nodes, weights), SHAPES, OPTIONS)


@needs_rtx
def test_engines_are_built_and_not_run(model: EagerModel, int8: GraphModel, tmp_path: Path) -> None:
    stage = ExportTensorRT(compute_capabilities=GPUS, gates=(MaxFileSize(mebibytes=2),))
    context = Context(root=tmp_path / "int8", data=samples(images()))
    engine = stage(int8, context)
    facts = engine.manifest.facts
    assert facts["built_for"]["compute_capabilities"] == [*GPUS]
    assert facts["layers"]["CONVOLUTION"] == 3
    assert facts["integer_layers"] == 4
    assert "not run: there is no CUDA device here" in engine.not_run
    plain = stage(model, Context(root=tmp_path / "float", data=samples(images())))
    assert plain.manifest.facts["integer_layers"] == 0
    with (
        pytest.raises(Unavailable, match=r"model\.engine: built for sm86, .* no CUDA") as caught,
        TensorRTEngine.from_directory(plain.path).open(),
    ):
        pass
    assert caught.value.exit_code == 4


@needs_rtx
def test_a_speedup_is_over_an_engine_for_the_same_gpus_and_sizes(
    model: EagerModel, int8: GraphModel, tmp_path: Path
) -> None:
    settings = {"compute_capabilities": ("sm86", "sm89"), "sizes": {"batch": (1, 2, 4)}}
    context = Context(tmp_path / "int8", artifacts={"source": model})
    small = ExportTensorRT.model_validate(settings).run_checked(int8, context)
    baseline = in_runtime_of(small, context)
    assert isinstance(baseline, BaselineArtifact)
    large = baseline.written()
    assert large.fact("built_for") == small.fact("built_for")
    assert large.fact("sizes") == {"batch": [1, 2, 4]}
    assert (large.fact("integer_layers"), small.fact("integer_layers")) == (0, 4)
    # Another stage's result, compared with `against: tensorrt`, gives no settings for engines.
    file = ExportOnnx().run_checked(model, context.with_root(tmp_path / "onnx"))
    assert ExportTensorRT.for_baseline(file, context) == ExportTensorRT()


def test_a_run_measures_sizes_alone_of_what_it_cannot_call(tmp_path: Path, monkeypatch) -> None:
    # Of any exporter, so that it needs no library.
    reason = "built for sm86 with TensorRT for RTX, and not run: there is no CUDA device here"
    monkeypatch.setattr(ExportOnnx, "not_run", reason)
    monkeypatch.setattr(OnnxModel, "open_file", None)
    stages = "[{stage: export_onnx, name: engine, gates: [{gate: max_file_size, mebibytes: 2}]}]"
    (tmp_path / "rows.py").write_text(DATA)
    run = pipeline(tmp_path, stages, "data: {factory: 'rows:splits'}\nloss: cross_entropy\n")
    namespace: dict = {}
    exec(NETS, namespace)
    torch.save(namespace["Net"]().state_dict(), tmp_path / "x.pt")
    for cached in (False, True):
        report = run.run(tmp_path / "out")
        (engine,) = report.stages
        assert engine.cached is cached
        assert engine.measurements.metric is None
        assert engine.measurements.bytes == engine.artifact.bytes
        assert engine.measurements.speedup_reason == f"not measured: {reason}"
        assert [verdict.passed for verdict in engine.verdicts] == [True]
        (line,) = [warning for warning in report.warnings if warning.startswith("engine: built")]
        assert line == f"engine: {reason}; its answers and its speed are not known"
        assert report.test is not None
        assert {*report.test.values} == {"source"}
    trusted = report.model_copy(update={"accuracy_doubts": ()})
    assert headline(trusted) is None
    assert f"engine: not measured: {reason}" in (tmp_path / "out" / "report.html").read_text()
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert content["stages"][0]["artifact"]["facts"]["not_run"] == reason
