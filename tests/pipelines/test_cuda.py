"""Pipelines on a CUDA device, and what of them runs on the CPU."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress import QuantizeStatic, QuantizeWeights, RotateWeights, cli
from compress.artifacts.artifact import Artifact
from compress.common.tensor_difference import relative_error
from compress.core.context import Context
from compress.export import ExportOnnx
from compress.pipelines.results.schema import Report
from compress.profiling.peak_memory import peak_memory
from tests.conftest import DIGITS
from tests.export.builders import IMAGE, images, network, samples
from tests.export.tiny_decoder import context_for, decoder
from tests.pipelines.conftest import measured_briefly

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STAGES = """version: 1
device: cuda
model: {factory: "models:resnet20", inputs: [{name: image, shape: [batch, 1, 8, 8]}]}
data: {factory: "data:digits", batch_size: 120, loader: {pin_memory: true}}
metric: accuracy
stages:
  - {stage: train, epochs: 8, precision: bf16, gates: [{gate: min_metric, at: 0.95}]}
  - {stage: prune_channels, ratio: 0.5, finetune: {epochs: 3, learning_rate: 0.02}}
  - {stage: distill, teacher: train, epochs: 3}
  - {stage: export_aot, device: cuda, input: distill, gates: [{gate: label_agreement}]}
  - {stage: export_torchscript, input: distill, gates: [{gate: label_agreement}]}
  - {stage: convert_precision, dtype: float16, input: distill, gates: [{gate: max_drop, points: 1}]}
  - {name: aot_half, stage: export_aot, device: cuda, gates: [{gate: max_drop, points: 1}]}
  - {stage: quantize_aware_training, input: distill, epochs: 1}
  - {stage: quantize_static, input: distill, gates: [{gate: max_drop, points: 1}]}
  - {name: integers, stage: export_torchscript, gates: [{gate: max_drop, points: 1}]}
  - {stage: export_onnx, input: quantize_static, gates: [{gate: label_agreement, minimum: 0.98}]}
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_stage_of_a_pipeline_passes(tmp_path: Path, monkeypatch, capfd) -> None:
    for code in ("models.py", "data.py"):
        shutil.copy(DIGITS / code, tmp_path)
    (tmp_path / "pipeline.yaml").write_text(STAGES)
    monkeypatch.chdir(tmp_path)
    with measured_briefly(), pytest.raises(SystemExit) as end:
        cli.app(["run", "pipeline.yaml", "--out", "results"])
    assert not end.value.code, capfd.readouterr().err
    report = Report.read(tmp_path / "results")
    devices = {stage.name: stage.measurements.device for stage in report.stages}
    on_cpu = {name for name, device in devices.items() if device == "cpu"}
    assert "integers" in on_cpu and on_cpu <= {"integers", "export_onnx"}
    compared = "integers: runs on cpu, and so did train where the two speeds were compared"
    assert any(warning.startswith(compared) for warning in report.warnings)


def answers(model: Artifact, device: str, inputs: torch.Tensor) -> torch.Tensor:
    with model.open(device) as predict:
        (output, *_) = predict(inputs)
    assert output.device.type == device
    return output.cpu()


def test_a_quantized_decoder_answers_as_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = decoder(tmp_path)
    context = replace(context_for(source, tmp_path / "quantized"), device="cuda")
    model = QuantizeWeights(method="gptq", activation_bits=32)(source, context)
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))
    assert relative_error(answers(model, "cpu", ids), answers(model, "cuda", ids)) < 1e-4


def test_rotations_are_exact_on_a_device(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    source = decoder(tmp_path)
    context = Context(root=tmp_path / "rotated", device="cuda")
    rotated = RotateWeights()(source, context)
    ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))
    assert relative_error(answers(source, "cuda", ids), answers(rotated, "cuda", ids)) < 1e-4


def test_memory_of_a_device_is_that_of_the_weights_and_the_answers(tmp_path: Path) -> None:
    model = network(tmp_path / "source", "networks:residual")
    found = peak_memory(model, "cuda", 1, [(images(256),)])
    assert found > model.payload_bytes / 2**20
    assert found < 16  # cuBLAS's workspace alone is 32 MiB on a Hopper


@pytest.mark.parametrize("quantized", [False, True])
def test_an_onnx_file_runs_where_onnxruntime_is_built_for_cuda(
    quantized: bool, tmp_path: Path
) -> None:
    model: Artifact = network(tmp_path / "source", "networks:residual")
    data = samples(images())
    if quantized:
        stage = QuantizeStatic(target="onnxruntime-cuda")
        model = stage(model, Context(root=tmp_path / "int8", data=data))
    exported = ExportOnnx()(model, Context(root=tmp_path / "onnx", data=data))
    if exported.runs_on("cuda") == "cpu":
        pytest.skip("needs onnxruntime-gpu instead of onnxruntime")
    with exported.open("cuda") as predict, exported.open("cpu") as expected:
        got, right = predict(images())[0], expected(images())[0]
        # TensorFloat-32 has 10 bits of mantissa.
        assert relative_error(right, got) < 5e-3
        assert [*predict(*IMAGE.example(1))[0].shape] == [1, 10]
