import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest
import torch

import compress
from compress import QuantizeStatic
from compress.artifacts.artifact import Artifact
from compress.common.errors import ArtifactInvalid, StageFailed, Unavailable
from compress.common.foreign.native_runtimes import openvino_core
from compress.common.signature import AxisBounds, Signature
from compress.core.context import Context
from compress.core.gates import LabelAgreement, MinSpeedup
from compress.export import ExportOnnx, ExportOpenVINO, OpenVINOModel
from compress.export.openvino.stage import OPENVINO, compiled, predictor, write
from compress.export.parity import report
from tests.export.builders import (
    EXACT_BITS,
    IMAGE_AND_CONTEXT,
    TOKENS,
    images,
    network,
    samples,
)
from tests.pipelines.conftest import measured_briefly


def largest_difference(model: Artifact, exported: Artifact, *inputs: torch.Tensor) -> float:
    pairs = zip(model.open()(*inputs), exported.open()(*inputs), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_every_input_and_output_keeps_its_name_and_place(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:two_inputs", IMAGE_AND_CONTEXT)
    exported = ExportOpenVINO()(model, Context(root=tmp_path / "openvino"))
    inputs = torch.randn(5, 1, 12, 9), torch.randn(5, 4)
    assert largest_difference(model, exported, *inputs) < 1e-5
    assert exported.signature == model.signature
    assert (exported.parameters(), exported.macs()) == (model.parameters(), model.macs())
    files = {"model.xml", "model.bin"}
    assert exported.model_files.keys() == files
    assert exported.payload_bytes == sum((exported.path / f).stat().st_size for f in files)
    # OpenVINO itself numbers operators by how many there were before in the process.
    again = ExportOpenVINO()(model, Context(root=tmp_path / "again"))
    assert again.model_files == exported.model_files


def test_constants_have_no_name_that_counts_the_operators_of_the_process(tmp_path: Path) -> None:
    # Of ReduceProd OpenVINO makes a ShapeOf, whose result it knows once the axis has its bounds.
    graph = """<ir_version: 9, opset_import: ["": 18]>
        graph (float[batch, length] x) => (float[batch, length] y) {
            k = Constant<value_ints = [2, 3]> ()
            shape = Shape(k)
            product = ReduceProd<keepdims = 0>(shape)
            factor = Cast<to = 1>(product)
            y = Mul(x, factor)
        }"""
    onnx.save(onnx.parser.parse_model(graph), tmp_path / "model.onnx")
    x: dict[str, Any] = {"name": "x", "shape": ["batch", "length"], "dtype": "float32"}
    axes = {"length": AxisBounds(min=1, max=8)}
    signature = Signature.model_validate({"inputs": [x], "outputs": [{"name": "y"}], "axes": axes})
    for name in ("one", "two"):
        write(tmp_path / "model.onnx", tmp_path / f"{name}.xml", signature)
    assert (tmp_path / "one.xml").read_text() == (tmp_path / "two.xml").read_text()


@pytest.mark.slow
def test_a_quantized_graph_and_its_onnx_file_run_in_integers(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:mobilenet")
    context = Context(root=tmp_path / "int8", data=samples(images(64)))
    graph = QuantizeStatic(calibration_samples=64, weight_bits=EXACT_BITS)(model, context)
    onnx = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    for source in (graph, onnx):
        gates = (LabelAgreement(minimum=0.95),)
        root = tmp_path / f"openvino of {source.kind}"
        exported = ExportOpenVINO(gates=gates)(source, context.with_root(root))
        facts = exported.manifest.facts
        assert sum(facts["integer_kernels"].values()) == 4
        assert facts["float_kernels"] == {}


@pytest.mark.slow
def test_openvino_is_a_baseline_of_speedup_gates(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:mlp")
    context = Context(root=tmp_path / "onnx", artifacts={"source": model})
    stage = ExportOnnx(gates=(MinSpeedup(ratio=0.001, against="openvino"),))
    exported = stage.run_checked(model, context)
    with measured_briefly():  # which finds a speedup on a busy machine, too
        (verdict,) = stage.judge(model, exported, context)
    assert verdict.passed
    assert verdict.against == "openvino"


def test_inputs_of_other_sizes_are_refused(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:mobilenet")
    exported = ExportOpenVINO()(model, Context(root=tmp_path / "openvino"))
    with exported.open() as predict:
        with pytest.raises(ValueError, match=r"^input image has shape \[2, 1, 9, 8\], expected "):
            predict(torch.randn(2, 1, 9, 8))
        first = predict(torch.randn(2, 1, 8, 8))[0]
        kept = first.clone()
        predict(torch.randn(2, 1, 8, 8))
        assert torch.equal(first, kept)  # an answer is not overwritten by the next one


def test_bounds_of_an_axis_are_in_the_file_and_named_in_errors(tmp_path: Path) -> None:
    signature = TOKENS.model_copy(update={"axes": {"length": AxisBounds(min=6, max=20)}})
    model = network(tmp_path / "source", "networks:sequence", signature)
    exported = ExportOpenVINO()(model, Context(root=tmp_path / "openvino"))
    file = openvino_core().read_model(exported.payload_path)
    assert file.input("tokens").partial_shape.to_string() == "[?,6..20]"
    with exported.open() as predict:
        assert predict(torch.zeros(2, 20, dtype=torch.int64))
        for size in (5, 21):
            message = (
                rf"tokens is torch.int64 \[2, {size}\], expected int64 \[batch, length of 6 to 20\]"
            )
            with pytest.raises(ValueError, match=message):
                predict(torch.zeros(2, size, dtype=torch.int64))


@pytest.mark.slow
def test_where_sums_are_cut_off_an_error_of_an_integer_file_says_so(
    tmp_path: Path, monkeypatch
) -> None:
    from compress.export.openvino import stage
    from compress.export.parity import report

    model = network(tmp_path / "source", "networks:mobilenet")
    context = Context(root=tmp_path / "int8", data=samples(images(64)))
    graph = QuantizeStatic(calibration_samples=64, weight_bits=EXACT_BITS)(model, context)
    onnx = ExportOnnx()(graph, context.with_root(tmp_path / "onnx"))
    right = stage.predictor
    monkeypatch.setattr(stage, "predictor", lambda m: lambda *x: tuple(2 * y for y in right(m)(*x)))
    monkeypatch.setattr(report, "has_16_bit_sums", lambda: True)
    with pytest.raises(StageFailed, match=r"has no VNNI, so that sums .* may be cut off"):
        ExportOpenVINO()(onnx, context.with_root(tmp_path / "openvino"))


def test_altered_weights_are_not_loaded(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:mlp")
    exported = ExportOpenVINO()(model, Context(root=tmp_path / "openvino"))
    weights = exported.path / "model.bin"
    content = bytearray(weights.read_bytes())
    content[8] ^= 1
    weights.chmod(0o644)
    weights.write_bytes(content)
    with pytest.raises(ArtifactInvalid, match=r"model\.bin is not the file that was sealed"):
        exported.open().__enter__()


@pytest.mark.slow
def test_wrong_answers_are_refused_with_a_script(tmp_path: Path, monkeypatch) -> None:
    from compress.export.openvino import stage

    right = stage.predictor

    def wrong(model):
        predict = right(model)
        return lambda *inputs: tuple(1.5 * y for y in predict(*inputs))

    monkeypatch.setattr(stage, "predictor", wrong)
    monkeypatch.setattr(report, "LEAST_SECONDS", 120.0)  # on a busy machine too
    model = network(tmp_path / "source", "networks:sequence", TOKENS)
    with pytest.raises(
        StageFailed, match=r"differ from the source's by 0\.5 .* see .*parity\.json"
    ):
        ExportOpenVINO()(model, Context(root=tmp_path / "openvino"))
    folder = tmp_path / "parity" / "export_openvino"
    assert "import openvino" in (folder / "reproduce.py").read_text()
    assert not (tmp_path / "openvino").exists()


def test_a_function_of_a_module(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    rows = torch.randn(3, 4)
    exported = compress.export_openvino(module, tmp_path / "net.xml", example_inputs=(rows,))
    assert isinstance(exported, OpenVINOModel)
    torch.testing.assert_close(exported.module(rows), module(rows), rtol=1e-4, atol=1e-5)
    # OpenVINO finds the weights by the file's name.
    (answers,) = predictor(compiled(tmp_path / "net.xml", threads=1))(rows)
    torch.testing.assert_close(answers, module(rows), rtol=1e-4, atol=1e-5)


def test_without_openvino_one_line_says_how_to_install_it(tmp_path: Path, monkeypatch) -> None:
    model = network(tmp_path / "source", "networks:mlp")
    exported = ExportOpenVINO()(model, Context(root=tmp_path / "openvino"))
    monkeypatch.setattr(type(OPENVINO), "missing", lambda _: True)
    with pytest.raises(
        Unavailable, match=r"needs openvino, which is not installed; pip install .*\[openvino\]"
    ):
        exported.open().__enter__()


@pytest.mark.slow
def test_a_signal_after_models_were_closed_does_not_end_the_process(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:mlp")
    exported = ExportOpenVINO()(model, Context(root=tmp_path / "openvino"))
    code = f"""
import gc, os, signal
from compress.export.openvino.stage import compiled
first, second = (compiled({str(exported.payload_path)!r}, 1) for _ in range(2))
del first
gc.collect()
del second
gc.collect()
signal.signal(signal.SIGUSR1, lambda *_: print("received"))
os.kill(os.getpid(), signal.SIGUSR1)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "received\n"), done.stderr
