"""`compress explain` and `compress repair` on a small network with two channels out of range."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

from compress import cli
from compress.common.errors import GateRefused
from compress.pipelines import Pipeline
from compress.pipelines.results.explanation import Explanations
from compress.pipelines.results.schema import Report
from compress.pipelines.runner import cache_keys
from tests.pipelines.conftest import measured_briefly

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def net():
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(16, 4))

def data():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (480,), generator=generator)
    x = 0.7 * torch.randn(480, 1, 6, 6, generator=generator)
    x[torch.arange(480), 0, (y // 2) * 3 + 1, (y % 2) * 3 + 1] += 6
    x[torch.arange(480), 0, :, 0] += y[:, None]
    parts = {"train": slice(0, 120), "val": slice(120, 480)}
    return {name: TensorDataset(x[s], y[s]) for name, s in parts.items()}

def shares():
    return net().append(nn.Sigmoid())

def numbers():
    wanted = lambda y: nn.functional.one_hot(y, 4).float()
    return {name: TensorDataset(s.tensors[0], wanted(s.tensors[1])) for name, s in data().items()}

def vectors():
    return {name: [(x,) for x in s.tensors[0]] for name, s in data().items()}
"""
FILE = """\
version: 1
name: net
model:
  factory: nets:net
  checkpoint: net.safetensors
  inputs: [{name: x, shape: [batch, 1, 6, 6]}]
data: {factory: "nets:data"}
stages:
  - name: int8
    stage: quantize_static      # all of it
    calibration_samples: 96
    gates: [{gate: max_drop, points: 1.0}]
  - {name: onnx, stage: export_onnx, gates: [{gate: max_drop, points: 2.0, against: source}]}
"""


def compress(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.app([*map(str, arguments)])
    return int(end.value.code or 0)


def trained(source: str, steps: int) -> nn.Module:
    """Return the network that a source defines, trained on the data that it defines."""
    scope: dict = {}
    exec(source, scope)
    torch.manual_seed(0)
    model = scope["net"]()
    x, y = scope["data"]()["train"].tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trained network and a run that a gate has refused."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "nets.py").write_text(NETS)
    (folder / "net.yaml").write_text(FILE)
    model = trained(NETS, steps=80)
    with torch.no_grad():
        for channels in (slice(0, 2),):
            model[0].weight[channels] *= 500
            model[0].bias[channels] *= 500
            model[2].weight[:, channels] /= 500
    save_file(model.state_dict(), folder / "net.safetensors")
    with measured_briefly():
        assert compress("run", folder / "net.yaml", "--out", folder / "out") == 3
    return folder


@pytest.fixture
def folder(refused: Path) -> Path:
    """Return the folder, with the results as the run left them."""
    kept = refused / "kept"
    if not kept.exists():
        shutil.copytree(refused / "out", kept)
    shutil.rmtree(refused / "out")
    shutil.copytree(kept, refused / "out")
    (refused / "net.yaml").write_text(FILE)
    return refused


@pytest.mark.slow
def test_the_stage_the_layer_and_the_cause_are_named(folder: Path, capfd) -> None:
    out = folder / "out"
    assert compress("explain", out) == 0
    said = capfd.readouterr().out
    assert "2: 1 of" in said and "one scale for unlike channels" in said and "equalize" in said
    (found,) = Explanations.read(out, Report.read(out)).explanations
    assert found.culprit == "int8" and found.split[0].points > 10
    assert [guilty.layer for guilty in found.guilty] == ["2"]
    assert found.recovered > 0.9 and found.confirmed > 0.9 and not found.spread
    assert found.causes[0].cause == "unlike_channels" and found.causes[0].layers["2"] > 100
    assert found.causes[0].returned > 0.9
    assert found.repairs[0] == {"equalize": True}
    assert "Why gates refused" in (out / "report.html").read_text()
    events = [json.loads(line)["event"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert {"patched", "cause_found"} <= {*events}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "task", "gate"),
    [
        ("data", "classification", "percent: 5"),
        # How answers of each task are compared is in tests of the gate.
        pytest.param("numbers", "regression", "percent: 5, error: 2", marks=pytest.mark.soak),
        ("vectors", "embedding", "percent: 5, error: 0.02"),
        pytest.param("numbers", "multilabel", "percent: 5", marks=pytest.mark.soak),
    ],
)
def test_other_answers_than_the_uncompressed_models_are_explained(
    answers: str, task: str, gate: str, folder: Path
) -> None:
    text = FILE.replace("nets:data", f"nets:{answers}").replace("data:", f"task: {task}\ndata:", 1)
    if task == "multilabel":  # of which one half is the limit
        text = text.replace("nets:net", "nets:shares")
    text = text.replace("{gate: max_drop, points: 1.0}", f"{{gate: max_disagreement, {gate}}}")
    text = text.replace("gates: [{gate: max_drop, points: 2.0, against: source}]", "gates: []")
    (folder / "net.yaml").write_text(text)
    out = folder / "out"
    with measured_briefly():
        assert compress("run", folder / "net.yaml", "--out", out) == 3
    assert compress("explain", out, "--gate", "max_disagreement") == 0
    report = Report.read(out)
    (found,) = Explanations.read(out, report).explanations
    (verdict,) = next(s for s in report.stages if s.name == "int8").verdicts
    assert found.culprit == "int8"
    assert found.split[0].points == pytest.approx(verdict.bound.measured)
    assert found.causes[0].cause == "unlike_channels" and found.repairs[0] == {"equalize": True}


@pytest.mark.slow
def test_a_repair_is_run_judged_by_all_gates_and_applied(folder: Path, capfd) -> None:
    out = folder / "out"
    assert compress("repair", out, "--apply") == 0
    assert "equalize: true: found" in capfd.readouterr().out
    content = json.loads((out / "explain.json").read_text())
    assert content["chosen"] == {"int8": {"equalize": True}}
    (tried,) = content["explanations"][0]["tried"]
    assert tried["passed"] and {*tried["verdicts"]} == {"int8", "onnx"}
    assert "+    equalize: true" in (out / "repair" / "repair.diff").read_text()
    applied = (folder / "net.yaml").read_text()
    assert applied == FILE.replace("# all of it\n", "# all of it\n    equalize: true\n")
    repaired = Pipeline.from_yaml(out / "repair" / "pipeline.yaml")
    assert repaired.run(out).status == "passed"
    assert [g.limit for s in repaired.stages for g in s.gates] == [1.0, 2.0]


@pytest.mark.slow
def test_a_run_repairs_at_once_and_is_refused_all_the_same(folder: Path, capfd) -> None:
    assert compress("run", folder / "net.yaml", "--out", folder / "out", "--repair") == 3
    assert "repair: what passes is in" in capfd.readouterr().err
    assert (folder / "net.yaml").read_text() == FILE, "changed by --apply alone"
    written = yaml.safe_load((folder / "out" / "repair" / "pipeline.yaml").read_text())
    assert written["stages"][0]["equalize"] is True


@pytest.mark.slow
def test_a_changed_file_is_not_explained_by_an_old_run(folder: Path, capfd) -> None:
    (folder / "net.yaml").write_text(FILE.replace("calibration_samples: 96", "observer: mse"))
    assert compress("explain", folder / "out") == 2
    said = capfd.readouterr().err
    assert "int8 would be made anew" in said and "(now int8 runs (settings." in said
    assert f"run it again: compress run {folder / 'net.yaml'}" in said


@pytest.mark.slow
def test_a_run_of_other_code_says_so(folder: Path, capfd, monkeypatch) -> None:
    text = FILE.replace("max_drop, points: 1.0", "min_metric, at: 0.99")
    (folder / "net.yaml").write_text(text)
    with measured_briefly():
        assert compress("run", folder / "net.yaml", "--out", folder / "out", "--quick") == 3
    monkeypatch.setattr(cache_keys, "versions", lambda: {"compress": "another"})
    assert compress("explain", folder / "out") == 2
    assert "(now source runs (versions.compress" in capfd.readouterr().err


def test_a_run_that_passed_has_nothing_to_explain(project, capfd) -> None:
    assert compress("explain", project.out) == 2
    said = capfd.readouterr().err
    assert "no gate refused; name one that passed by --stage and --gate" in said
    assert "prune_channels/max_drop" in said


def test_a_gate_without_causes_is_not_explained(project, capfd) -> None:
    gate = "gate: min_cosine, minimum: 0.999999, against: source"
    project.edit("gate: parity, atol: 1e-4", gate)
    with pytest.raises(GateRefused):
        project.run()
    assert compress("explain", project.out) == 2
    said = capfd.readouterr().err
    assert "min_cosine is not explained; expected one of max_drop, " in said


def test_a_time_without_a_unit_is_refused(project, capfd) -> None:
    assert compress("repair", project.out, "--time", "10") == 2
    assert "--time 10: expected a number with its unit" in capfd.readouterr().err


def test_a_stage_without_layers_to_put_back_says_so(project, capfd) -> None:
    code = compress("explain", project.out, "--stage", "prune_channels")
    said = capfd.readouterr()
    assert code == 3
    assert "points lost" in said.out and "no cause was found" in said.err


MLP = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def net():
    layers = [nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(32, 4))

def data():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (480,), generator=generator)
    x = torch.randn(480, 32, generator=generator) + 3 * torch.eye(32)[y]
    parts = {"train": slice(0, 120), "val": slice(120, 480)}
    return {name: TensorDataset(x[s], y[s]) for name, s in parts.items()}
"""
WEIGHTS = """\
version: 1
name: mlp
model:
  factory: mlp:net
  checkpoint: mlp.safetensors
  inputs: [{name: x, shape: [batch, 32]}]
data: {factory: "mlp:data"}
stages:
  - {stage: quantize_weights, group_size: 32, gates: [{gate: max_drop, points: 1.0}]}
"""


@pytest.mark.soak
def test_a_stage_is_run_again_without_layers_and_with_other_bits(tmp_path: Path, capfd) -> None:
    (tmp_path / "mlp.py").write_text(MLP)
    (tmp_path / "mlp.yaml").write_text(WEIGHTS)
    model = trained(MLP, steps=60)
    with torch.no_grad():  # an input that is always 0, with weights that widen each group's range
        model[0].weight[5], model[0].bias[5] = 0, -1
        model[2].weight[:, 5] = 60 * model[2].weight.abs().amax()
    save_file(model.state_dict(), tmp_path / "mlp.safetensors")
    out = tmp_path / "out"
    assert compress("run", tmp_path / "mlp.yaml", "--out", out) == 3
    capfd.readouterr()
    assert compress("explain", out) == 0
    (found,) = Explanations.read(out, Report.read(out)).explanations
    assert [guilty.layer for guilty in found.guilty] == ["2"]
    assert found.recovered > 0.8 and found.causes[0].cause == "few_weight_bits"
