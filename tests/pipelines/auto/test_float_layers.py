"""`compress auto` leaves single layers of a quantized model in float."""

import json
from pathlib import Path

import pytest
import yaml

from compress import cli
from compress.pipelines.auto.candidates import Candidate, CheckedModel
from compress.pipelines.config.auto_settings import AutoSettings
from compress.pipelines.config.pipeline import PipelineConfig

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def net():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 36, 3),
    )
    with torch.no_grad():  # two channels of its inputs are 500 times as large as the others
        module[0].weight[:, :2] /= 500
    return module

def data():
    x = torch.randn(180, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    x[:, :2] *= 500
    y = net()(x).argmax(1)
    parts = {"train": slice(0, 60), "val": slice(60, 180)}
    return {name: TensorDataset(x[s], y[s]) for name, s in parts.items()}
"""
FILE = """\
version: 1
name: net
model:
  factory: nets:net
  inputs: [{name: x, shape: [batch, 4, 6, 6]}]
data: {factory: "nets:data"}
auto:
  limits: {max_drop: 2}
  time: 5m
  space: {widths: null, formats: [int8_static]}
stages: []
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "net.yaml").write_text(FILE)
    return tmp_path / "net.yaml"


@pytest.mark.soak
def test_the_layer_that_integers_ruin_stays_in_float(file: Path, tmp_path: Path, capfd) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as end:
        cli.app(["auto", str(file), "--out", str(out), "--json"])
    assert not end.value.code
    front = json.loads(capfd.readouterr().out)
    checked = {model["name"]: model for model in front["checked"]}
    assert checked["int8_static-whole"]["drop"] > 2
    best = checked[front["best"]]
    layers = best["float_layers"]  # the others too where they are measured to be faster so
    assert "0" in layers and len(layers) < 3 and best["drop"] <= 2
    assert best["bytes"] > checked["int8_static-whole"]["bytes"]
    assert f", {len(layers)} layers in float" in (out / "front.html").read_text()
    # The pipeline of its point makes the same file.
    point = out / "points" / str(front["points"].index(front["best"]) + 1) / "pipeline.yaml"
    stages = yaml.safe_load(point.read_text())["stages"]
    assert stages[0] == {"stage": "quantize_static", "smooth": "auto", "exclude": layers}
    with pytest.raises(SystemExit) as end:
        cli.app(["run", str(point), "--out", str(tmp_path / "again"), "--quiet"])
    assert not end.value.code
    again = tmp_path / "again" / "artifacts" / "export_onnx" / "model.onnx"
    made = out / "candidates" / best["name"] / "artifacts" / "export_onnx" / "model.onnx"
    assert again.read_bytes() == made.read_bytes()


def test_a_candidate_without_float_layers_has_the_name_and_stages_of_before(file: Path) -> None:
    base, settings = PipelineConfig.from_yaml(file), AutoSettings()
    widths = (("0", 16),)
    assert Candidate("int8_static").name == "int8_static-whole"
    assert Candidate("int8_static", widths).name == "int8_static-5b9fcd8c"
    mixed = Candidate("int8_static", widths, ("2",))
    assert len({mixed.name, Candidate("int8_static", widths).name, "int8_static-whole"}) == 3
    stages = [Candidate("int8_static", widths, f).stages(base, settings)[1] for f in ((), ("2",))]
    assert stages == [
        {"stage": "quantize_static", "smooth": "auto"},
        {"stage": "quantize_static", "smooth": "auto", "exclude": ["2"]},
    ]
    figures = {"predicted_ms": None, "latency_ms": 1.0, "bytes": 1, "loss": 0.0, "drop": 0.0}
    checked = CheckedModel(
        name=mixed.name, format="int8_static", widths={"0": 16}, float_layers=("2",), **figures
    )
    assert checked.candidate == mixed
