"""`compress auto` on a small network: its front, limits, resuming, and the pipelines it writes."""

import json
from pathlib import Path

import numpy
import pytest
import torch
import yaml
from torch import nn

import compress
from compress import cli
from compress.common.requirements import Requirement
from compress.common.sealed_json import load_sealed
from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 48, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 2),
    )

def data():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(180) % 2
    x = torch.randn(180, 1, 12, 12, generator=generator) + y[:, None, None, None]
    parts = {"train": slice(0, 60), "val": slice(60, 120), "test": slice(120, 180)}
    return {name: TensorDataset(x[s], y[s]) for name, s in parts.items()}
"""
FILE = """\
version: 1
name: net
model:
  factory: nets:net
  inputs: [{name: x, shape: [batch, 1, 12, 12]}]
data: {factory: "nets:data"}
auto:
  limits: {max_drop: 5}
  time: 5m
  space: {widths: {values: 2}, formats: [float, int8_static]}
stages:
  - {stage: train, epochs: 6}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "net.yaml").write_text(FILE)
    return tmp_path / "net.yaml"


def auto(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.app(["auto", *map(str, arguments)])
    return int(end.value.code or 0)


@pytest.mark.slow
def test_a_search_finds_a_faster_model_and_goes_on_where_it_was(
    file: Path, tmp_path: Path, capfd, monkeypatch
) -> None:
    out = tmp_path / "out"
    assert auto(file, "--out", out, "--json", "--size", "1MB") == 0
    front = json.loads(capfd.readouterr().out)
    assert front == load_sealed((out / "front.json").read_bytes())
    checked = {model["name"]: model for model in front["checked"]}
    assert {"float-whole", "int8_static-whole"} < {*checked}
    cut = [model for model in checked.values() if model["widths"]]
    assert cut and all(w < 48 for model in cut for w in model["widths"].values())
    best = checked[front["best"]]
    assert best["latency_ms"] < checked["float-whole"]["latency_ms"]
    assert best["drop"] <= 5 and best["confirmed_drop"] <= 5
    # The pipeline of a point makes the same file without a search.
    number = front["points"].index(front["best"]) + 1
    point = out / "points" / str(number) / "pipeline.yaml"
    stages = yaml.safe_load(point.read_text())["stages"]
    assert stages[-1]["gates"] == [
        {"gate": "max_drop", "against": "train", "points": 5.0},
        {"gate": "max_file_size", "mebibytes": 10**6 / 2**20},
    ]
    with pytest.raises(SystemExit) as end:
        cli.app(["run", str(point), "--out", str(tmp_path / "again"), "--quiet"])
    assert not end.value.code
    again = tmp_path / "again" / "artifacts" / "export_onnx" / "model.onnx"
    made = out / "candidates" / best["name"] / "artifacts" / "export_onnx" / "model.onnx"
    assert again.read_bytes() == made.read_bytes()
    # A second search begins with what the first one found.
    built: list[str] = []
    monkeypatch.setattr(
        CandidateEvaluator, "evaluate", lambda self, candidate, *_: built.append(candidate)
    )
    assert auto(file, "--out", out, "--json", "--time", "1s") == 0
    assert not built and json.loads(capfd.readouterr().out)["checked"] == front["checked"]


@pytest.mark.soak
def test_limits_that_cannot_be_met_are_told_with_the_nearest_model(
    file: Path, tmp_path: Path, capfd
) -> None:
    arguments = (
        file,
        "--out",
        tmp_path / "out",
        "--latency",
        "1us",
        "--max-drop",
        "3",
        "--time",
        "5m",
    )
    assert auto(*arguments) == 3
    printed = capfd.readouterr()
    assert "no model can be within a drop of 3 points, 0.001 ms a call: the nearest" in printed.err
    assert printed.err.strip().endswith("allow more latency")
    assert "no model that was checked meets all limits" in printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--latency", "2"), "--latency 2: expected a number with its unit (us, µs, ms, s)"),
        (("--size", "1 tonne"), "--size 1 tonne: expected a number with its unit (B, kB, MB"),
        (("--time", "0s"), "--time 0s: Input should be greater than 0"),
    ],
)
def test_values_without_a_known_unit_are_refused(
    arguments: tuple[str, ...], message: str, file: Path, capfd
) -> None:
    assert auto(file, *arguments) == 2
    assert message in capfd.readouterr().err


def test_a_runtime_that_is_unknown_or_not_installed_is_refused(
    file: Path, capfd, monkeypatch
) -> None:
    file.write_text(FILE.replace("formats:", "runtimes: [tensorrt], formats:"))
    assert auto(file) == 2
    assert "auto.space.runtimes[0]: expected 'onnx', 'openvino'" in capfd.readouterr().err
    file.write_text(FILE.replace("formats:", "runtimes: [onnx, openvino], formats:"))
    monkeypatch.setattr(Requirement, "missing", lambda self: self.what == "openvino")
    assert auto(file) == 4
    assert "net.yaml:10: auto.space.runtimes: openvino needs openvino" in capfd.readouterr().err


def test_data_are_needed(file: Path, capfd) -> None:
    assert auto("nets:net") == 2
    assert "`val`: give --data, or a pipeline file" in capfd.readouterr().err
    assert auto(file, "--data", "nets:data") == 2
    assert "net.yaml names its model and data" in capfd.readouterr().err
    content = yaml.safe_load(FILE)
    del content["data"]
    file.write_text(yaml.safe_dump(content))
    assert auto(file) == 2
    assert "`compress auto` decides by `val`; add a `data:` section" in capfd.readouterr().err
    file.write_text(FILE + "metric: none\n")
    assert auto(file) == 2
    error = capfd.readouterr().err
    assert "metric: none: `compress auto` decides by a metric; name one with `metric:`" in error
    assert "data with targets and a metric such as `r2`, `mae` or `mse`; then: compress" in error
    assert "such as `fidelity`" in error and error.endswith(f"; then: compress auto {file}\n")


@pytest.mark.slow
def test_a_model_and_its_data_need_no_file(tmp_path: Path, capfd, monkeypatch) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    limits = ("--size", "1MB", "--time", "0.01s")
    assert auto("nets:net", "--data", "nets:data", *limits, "--json") in (0, 3)
    front = json.loads(capfd.readouterr().out)
    assert front["checked"][0]["name"] == "float-whole"
    # What so little time allows, and what is left out.
    left_out = " ".join(front["not_searched"])
    assert "int8_static-whole: there was no more time" in left_out and "widths" in left_out
    assert len(front["checked"]) == 1 and sum(front["spent"].values()) > front["time_limit"] == 0.01
    written = yaml.safe_load(Path("runs/nets-net/pipeline.yaml").read_text())
    assert written["stages"] == [{"stage": "train", "epochs": 10}]
    assert written["auto"] == {"limits": {"size": "1000000.0B"}, "time": "0.01s"}

    # The file that `init` writes has stages that are searched.
    with pytest.raises(SystemExit):
        cli.app(["init", "nets:net", "--data", "nets:data"])
    assert "quantize_static" in Path("pipeline.yaml").read_text()
    assert auto("pipeline.yaml", "--out", "runs/nets-net", *limits) in (0, 3)
    left_out = (
        "left out from the first searched stage on: prune_channels, quantize_static, export_onnx"
    )
    assert left_out in capfd.readouterr().err
    # Paths lead out of a folder that is new. A file of the user's own is not overwritten.
    rows = {"x": torch.randn(60, 1, 12, 12).numpy(), "y": torch.arange(60).numpy() % 2}
    numpy.savez("rows.npz", **rows)
    assert auto("nets:net", "--data", "rows.npz", "--out", "new/a", *limits) in (0, 3)
    assert (
        yaml.safe_load(Path("new/a/pipeline.yaml").read_text())["data"]["arrays"]
        == "../../rows.npz"
    )
    assert auto("nets:net", "--data", "no.npz", "--out", "newer/a") == 2
    assert not Path("newer").exists()
    Path("mine").mkdir()
    Path("mine/pipeline.yaml").write_text("version: 1\n")
    assert auto("nets:net", "--data", "nets:data", "--out", "mine") == 2
    assert "mine/pipeline.yaml exists and is not overwritten" in capfd.readouterr().err
    assert Path("mine/pipeline.yaml").read_text() == "version: 1\n"


def test_a_file_of_a_search_alone_is_no_pipeline_to_run(file: Path, capfd) -> None:
    file.write_text(FILE.partition("stages:")[0])
    with pytest.raises(SystemExit) as end:
        cli.app(["check", str(file)])
    assert end.value.code == 2
    assert "has no stages to run; search with: compress auto" in capfd.readouterr().err


@pytest.mark.soak
@pytest.mark.slow
def test_a_module_in_memory_is_searched_as_well(tmp_path: Path) -> None:
    x = torch.randn(120, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(
        *(nn.Conv2d(1, 48, 3), nn.ReLU(), nn.Conv2d(48, 48, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 2)),
    )
    data = (x, model(x).argmax(1))
    arguments = {"train": data, "val": data, "formats": ["float"], "widths": {"values": 2}}
    found = compress.auto(model, **arguments, size="20kB", time="5m", out=tmp_path / "out")
    assert found.artifact.payload_bytes <= 20_000
    assert found.module(x[:5]).shape == (5, 2)
    with pytest.raises(compress.GateRefused, match=r"no model can be within 0\.001 MB"):
        compress.auto(model, **arguments, size="1kB", time="5m", out=tmp_path / "out")
    with pytest.raises(compress.PipelineInvalid, match="latency: expected a number with its unit"):
        compress.auto(model, **arguments, latency="2")
