"""How often a run calls models: what each further sample of `val` costs, by form of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from compress.common.counts import counted
from compress.common.errors import GateRefused, PipelineInvalid, StageFailed
from compress.core.gates.runtime import BaselineArtifact
from compress.export.onnx.stage import ExportOnnx
from compress.pipelines import Pipeline
from compress.pipelines.reporting.terminal_table import closing_lines
from compress.pipelines.results.schema import Report
from compress.pipelines.runner import executor, run_state

if TYPE_CHECKING:
    from pathlib import Path

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))

def data(val):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(64 + val) % 3
    x = torch.randn(64 + val, 4, generator=generator) + 3 * torch.eye(4)[y]
    parts = {"train": slice(0, 64), "val": slice(64, None)}
    return {name: TensorDataset(x[s], y[s]) for name, s in parts.items()}
"""
FILE = """
version: 1
model: {{factory: "nets:mlp", inputs: [{{name: x, shape: [batch, 4]}}]}}
data: {{factory: "nets:data", arguments: {{val: {val}}}, batch_size: 32}}
stages:
  - {{stage: quantize_static, name: int8, gates: [{{gate: max_drop, points: {points}}}]}}
  - stage: export_onnx
    name: onnx
    gates:
      - {{gate: max_drop, points: 50, against: {against}}}
      - {{gate: label_agreement, minimum: 0.1, against: {against}}}
      - {{gate: parity, atol: 100, against: {against}}}
"""


def run(
    folder: Path, val: int, against: str, points: float = 50, measured: str = "none"
) -> tuple[dict[str, int], Report]:
    """Run the pipeline on so many samples of `val`; return the rows by form, and its report."""
    folder.mkdir(parents=True)
    (folder / "nets.py").write_text(NETS)
    (folder / "small.yaml").write_text(FILE.format(val=val, against=against, points=points))
    before = counted()
    report = Pipeline.from_yaml(folder / "small.yaml").run(folder / "out", measured=measured)
    rows = {
        form: counted()[f"forwards.{form}.rows"] - before.get(f"forwards.{form}.rows", 0)
        for form in ("eager", "graph", "onnx")
    }
    return rows, report


@pytest.mark.slow
@pytest.mark.parametrize(("against", "graph_passes"), [("int8", 1), ("source", 0)])
def test_each_form_answers_once_for_a_sample_and_the_file_for_its_graph(
    tmp_path: Path, against: str, graph_passes: int
) -> None:
    val = 1000
    rows, report = run(tmp_path / "run", val, against)
    int8, onnx = report.stages
    assert (int8.answered_by, onnx.answered_by) == ("onnx", "")
    # Beside `val`: batch dependence, sizes of the axes, adversarial inputs, 128 samples of parity.
    assert val <= rows["eager"] < val + 250
    assert val <= rows["onnx"] < val + 350
    assert graph_passes * val <= rows["graph"] < graph_passes * val + 250
    before, folder = counted(), tmp_path / "run"
    again = Pipeline.from_yaml(folder / "small.yaml").run(folder / "out", measured="none")
    called = {name for name, n in counted().items() if n > before.get(name, 0)}
    assert not {name for name in called if name.startswith("forwards.")}, "all is in the store"
    assert [s.verdicts for s in again.stages] == [s.verdicts for s in report.stages]


@pytest.mark.slow
def test_scores_of_cached_stages_are_known_once_another_stage_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StageFailed("no file today")

    (tmp_path / "nets.py").write_text(NETS)
    file = tmp_path / "small.yaml"
    # Without the gates that compare outputs.
    lines = FILE.format(val=60, against="source", points=50).splitlines()[:-2]
    file.write_text("\n".join(lines))
    for _ in range(2):  # libraries set variables when they are imported: the data are read again
        with monkeypatch.context() as patch, pytest.raises(StageFailed, match="no file today"):
            patch.setattr(ExportOnnx, "prove", fail)
            Pipeline.from_yaml(file).run(tmp_path / "out")
    before = counted()
    report = Pipeline.from_yaml(file).run(tmp_path / "out")
    assert [stage.cached for stage in report.stages] == [True, False]
    assert counted()["forwards.eager.rows"] == before["forwards.eager.rows"]


def test_a_refused_graph_leaves_no_export(tmp_path: Path) -> None:
    with pytest.raises(GateRefused):
        run(tmp_path / "run", 60, "source", points=-99)
    report = Report.read(tmp_path / "run" / "out")
    assert [s.name for s in report.stages] == ["int8"]
    assert [s.name for s in report.skipped] == ["onnx"]
    assert report.stages[0].answered_by == "onnx"
    assert {p.name for p in (tmp_path / "run/out/artifacts").iterdir()} == {"source", "int8"}


def test_a_graph_whose_export_fails_answers_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StageFailed("no file today")

    monkeypatch.setattr(ExportOnnx, "prove", fail)
    with pytest.raises(StageFailed, match="no file today"):
        run(tmp_path / "run", 60, "source")
    report = Report.read(tmp_path / "run" / "out")
    assert [(s.name, s.answered_by, s.status) for s in report.stages] == [("int8", "", "passed")]
    assert [f.name for f in report.failures] == ["onnx"]


def test_a_cached_file_answers_only_once_it_was_compared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StageFailed("wrong on this machine")

    run(tmp_path / "run", 60, "source")
    monkeypatch.setattr(ExportOnnx, "check_parity", fail)
    file = tmp_path / "run" / "small.yaml"
    # Another machine with the same store: all is measured anew, and nothing made.
    monkeypatch.setattr(run_state, "machine", lambda: {"processor": "another"})
    with pytest.raises(StageFailed, match="wrong on this machine"):
        Pipeline.from_yaml(file).run(tmp_path / "run" / "out", measured="none")
    report = Report.read(tmp_path / "run" / "out")
    assert [(s.name, s.answered_by, s.cached) for s in report.stages] == [("int8", "", True)]


@pytest.mark.slow
def test_a_large_models_file_answers_for_it_where_it_is_written_anyway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "DEAR_MACS", 1)
    val = 400
    rows, report = run(tmp_path / "run", val, "source", measured="all")
    assert report.baseline_answered_by == "source in ONNX Runtime"
    lines = [line.plain for line in closing_lines(report, tmp_path)]
    assert "source: metric and outputs were measured on source in ONNX Runtime" in lines
    # Of the model 16 samples are compared with the file's, sizes of the axis, adversarial inputs.
    assert rows["eager"] <= 100
    # `val` of both files once, 65 rows of each for batch dependence, and what shows them right.
    assert rows["onnx"] <= 2 * (val + 65) + 128 + 150
    measured = report.baseline
    assert measured and measured.metric and measured.metric.samples == val
    before, folder = counted(), tmp_path / "run"
    again = Pipeline.from_yaml(folder / "small.yaml").run(folder / "out")
    assert (again.baseline, again.baseline_answered_by) == (measured, report.baseline_answered_by)
    called = {name for name, n in counted().items() if n > before.get(name, 0)}
    assert not {name for name in called if name.startswith("forwards.")}, "all is in the store"


def test_a_model_whose_file_cannot_be_written_answers_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StageFailed("no file today")

    monkeypatch.setattr(executor, "DEAR_MACS", 1)
    monkeypatch.setattr(BaselineArtifact, "written", fail)
    rows, report = run(tmp_path / "run", 60, "source", measured="all")
    assert (report.status, report.baseline_answered_by) == ("passed", "")
    assert rows["eager"] >= 60


def test_targets_for_other_answers_are_refused_before_a_large_models_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[object] = []

    def write(file: BaselineArtifact) -> None:
        written.append(file)
        raise StageFailed("no file today")

    monkeypatch.setattr(executor, "DEAR_MACS", 1)
    monkeypatch.setattr(BaselineArtifact, "written", write)
    of_pixels = NETS.replace("TensorDataset(x[s], y[s])", "TensorDataset(x[s], y[s, None, None])")
    monkeypatch.setitem(globals(), "NETS", of_pixels)
    with pytest.raises(PipelineInvalid, match=r"labels have shape .* and targets"):
        run(tmp_path / "run", 60, "source", measured="all")
    assert not written


@pytest.mark.slow
def test_the_file_of_a_large_model_answers_on_data_on_which_it_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise StageFailed("wrong on these data")

    monkeypatch.setattr(executor, "DEAR_MACS", 1)
    _, report = run(tmp_path / "run", 60, "source", measured="all")
    assert report.baseline_answered_by
    file = tmp_path / "run" / "small.yaml"
    file.write_text(file.read_text().replace("val: 60", "val: 61"))
    for name in ("prove", "prove_baseline", "check_parity"):
        monkeypatch.setattr(ExportOnnx, name, fail)
    with pytest.raises(StageFailed, match="wrong on these data"):
        Pipeline.from_yaml(file).run(tmp_path / "run" / "out")
    assert not Report.read(tmp_path / "run" / "out").baseline_answered_by


@pytest.mark.slow
def test_a_large_model_answers_itself_where_another_format_is_exported_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "DEAR_MACS", 1)
    stage = "  - {{stage: export_torchscript, input: source}}\n"
    monkeypatch.setitem(globals(), "FILE", FILE + stage)
    _, report = run(tmp_path / "run", 60, "source", measured="all")
    assert (report.status, report.baseline_answered_by) == ("passed", "")
