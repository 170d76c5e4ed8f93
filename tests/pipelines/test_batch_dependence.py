"""A model that is right in batches and wrong alone does not pass, and says so aloud."""

import json
from pathlib import Path

import pytest

from compress.common.errors import GateRefused
from compress.pipelines import Pipeline
from compress.pipelines.reporting.html import render
from compress.pipelines.reporting.terminal_table import closing_lines
from compress.pipelines.results.schema import Report
from tests.pipelines.conftest import Project, measured_briefly

NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Standardized(nn.Module):
    # Subtracts the batch's mean in eval mode too: a row alone is its own mean.

    def forward(self, x):
        return x - x.mean(0)

def data():
    y = torch.arange(96) % 3
    x = 3 * torch.eye(3)[y] + torch.arange(96.0)[:, None] / 9600
    return {"val": TensorDataset(x, y), "test": TensorDataset(x, y)}
"""
FILE = """\
version: 1
model:
  factory: nets:Standardized
  inputs: [{name: x, shape: [batch, 3]}]
data: {factory: "nets:data"}
stages:
  - stage: export_onnx
    gates: [{gate: min_metric, at: 0.9}, {gate: parity, atol: 1e-5}]
  - {stage: package_triton, gates: []}
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("standardized")
    (folder / "nets.py").write_text(NETS)
    (folder / "small.yaml").write_text(FILE)
    project = Project(folder)
    with pytest.raises(GateRefused, match=r"min_metric: metric >= 0\.9, found 0\.3333"):
        project.run()
    return project


def test_the_gate_sees_what_single_requests_get(refused: Project) -> None:
    report = Report.read(refused.out)
    assert report.status == "refused"
    (stage,) = report.stages
    metric, parity = stage.verdicts
    assert metric.value == pytest.approx(1 / 3) and not metric.passed
    assert parity.passed
    assert stage.measurements.metric.value == report.baseline.metric.value == metric.value
    found = stage.measurements.batch_dependence
    assert found.depends and found.source == "val" and "alone" in found.beyond_rounding


def test_it_is_said_in_the_terminal_on_the_page_and_in_json(refused: Project) -> None:
    report = Report.read(refused.out)
    overlap, useless, warning = report.warnings
    assert overlap.startswith("val shares 96 of its 96 samples with test")
    assert useless.startswith("source, export_onnx: accuracy is no better than that of one and")
    assert warning.startswith("source (and export_onnx): answers depend on what else is in")
    assert f"! {warning}" in map(str, closing_lines(report, refused.out))
    assert "answers depend on what else is in the batch" in render(report, refused.out)
    content = json.loads((refused.out / "report.json").read_text())
    assert content["warnings"] == [overlap, useless, warning]
    assert content["baseline"]["batch_dependence"]["beyond_rounding"]


def test_a_second_run_asks_no_model_again(
    refused: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.profiling.batch_dependence.measure_artifact", lambda *_: 1 / 0)
    before = Report.read(refused.out).stages[0].verdicts
    with pytest.raises(GateRefused):
        refused.run()
    assert Report.read(refused.out).stages[0].verdicts == before


@pytest.mark.slow
def test_served_in_such_batches_it_passes_and_is_packaged_for_single_requests(
    refused: Project,
) -> None:
    text = refused.file.read_text().replace("version: 1\n", "version: 1\nserved_batch_size: 96\n")
    file = refused.folder / "batches.yaml"
    file.write_text(text)
    with measured_briefly():
        report = Pipeline.from_yaml(file).run(refused.folder / "batches")
    assert report.status == "passed"
    assert report.stages[0].measurements.metric.value == 1.0
    assert report.test.values["package_triton"] == 1.0
    config = refused.folder / "batches/artifacts/package_triton/model/config.pbtxt"
    assert "dynamic_batching" not in Path(config).read_text()
