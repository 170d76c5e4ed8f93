"""A pipeline that begins with an ONNX file, whose stages need PyTorch."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import ArtifactInvalid
from compress.graph.from_onnx import registry
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
