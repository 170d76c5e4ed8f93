"""What cutting each family alone does: measured, as a table, and as a page."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from compress import cli
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.forward import run_in_eval
from compress.common.signature import Signature, TensorSpec
from compress.core.context import Context
from compress.pipelines import Pipeline
from compress.pipelines.commands.sensitivity import lines_below, measure_and_write, plot, table
from compress.pruning.sensitivity_analysis import measure_sensitivity

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(4, 16), nn.Linear(16, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.first.weight[4:].mul_(1e-3)
            self.first.bias[4:].mul_(1e-3)

    def forward(self, x):
        return self.third(self.second(self.first(x).relu()).relu())
"""


@pytest.fixture
def model(tmp_path: Path):
    (tmp_path / "wide.py").write_text(NETS)
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    recipe = Recipe(factory="wide:Net")
    return import_checkpoint(
        tmp_path / "source", recipe, signature, checkpoint=None, folder=tmp_path
    )


def test_families_are_cut_alone_and_ranked(model, tmp_path: Path) -> None:
    updates = []
    context = Context(root=tmp_path / "out", progress=lambda *what: updates.append(what))
    found = measure_sensitivity(model, context, ratios=(0.5, 0.75), latency=False)
    idle, used = found.families
    assert (idle.name, idle.channels, used.name) == ("first", 16, "second")
    assert [p.removed for p in idle.points] == [8, 12]
    assert [p.removed for p in used.points] == [4, 6]
    assert all(p.distance < 0.01 for p in idle.points)  # its last twelve channels hardly speak
    assert used.points[1].distance > used.points[0].distance > 0.01
    macs = 4 * 16 + 16 * 8 + 8 * 3
    assert idle.points[0].macs == pytest.approx((4 * 8 + 8 * 8 + 8 * 3) / macs)
    assert found.judged_by == "outputs" and found.value is None
    assert found.pinned == {"third": "it is an output of the model"}
    assert updates[-1][:3] == ("sensitivity", 4, 4)


def test_harm_is_that_of_the_cut(model, tmp_path: Path) -> None:
    found = measure_sensitivity(
        model, Context(root=tmp_path / "out"), ratios=(0.5,), latency=False, exclude=("first",)
    )
    (only,) = found.families
    assert found.pinned["first"] == "excluded by 'first'"
    module, context = model.load(), Context(root=tmp_path / "out")
    x = torch.cat([inputs[0] for inputs in context.comparison_inputs(model.signature)])
    before = run_in_eval(module, (x,))[0]
    second = module.second
    norms = second.weight.square().sum(1) + second.bias.square()
    gone = (norms + module.third.weight.square().sum(0)).argsort()[:4]
    module.second.weight.data[gone] = 0
    module.second.bias.data[gone] = 0
    expected = (run_in_eval(module, (x,))[0] - before).norm() / before.norm()
    assert only.points[0].distance == pytest.approx(float(expected), rel=1e-4)


def test_a_pipelines_model_is_measured_once_it_is_made(project) -> None:
    pipeline = Pipeline.from_yaml(project.file)
    with pytest.raises(StageFailed, match=r"reads 'train', which is not made yet \(runs .*--until"):
        measure_and_write(pipeline, project.folder / "elsewhere", ratios=(0.5,))
    before = {p.name for p in (project.out / "artifacts").iterdir()}
    found = measure_and_write(pipeline, project.out, ratios=(0.5,), samples=40)
    assert {p.name for p in (project.out / "artifacts").iterdir()} == before
    (family,) = found.families
    (point,) = family.points
    assert (found.judged_by, found.metric, found.samples) == ("metric", "accuracy", 40)
    assert found.value > 0.5 and point.latency > 0 and family.channels == 32
    written = json.loads((project.out / "sensitivity.json").read_text())
    assert written == found.model_dump(mode="json")
    page = (project.out / "sensitivity.html").read_text()
    assert "<script" not in page and "http" not in page
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    rows = table(found)
    assert rows.row_count == 1 and [c.header for c in rows.columns][2:] == [
        "-50 %", "MACs", "latency"
    ]  # fmt: skip
    assert list(lines_below(found, project.out))[-1] == f"plot: {project.out / 'sensitivity.html'}"
    marks = plot(found)["lines"][0]["marks"]
    assert all(0 < x < 880 and 0 < y < 420 for x, y, _ in marks)


def test_a_wrong_ratio_is_refused(project) -> None:
    with pytest.raises(PipelineInvalid, match=r"--ratio 1.5: expected a fraction between 0 and 1"):
        measure_and_write(Pipeline.from_yaml(project.file), project.out, ratios=(0.5, 1.5))


def test_the_command_prints_text_and_json(project, monkeypatch, capfd) -> None:
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("NO_COLOR", "1")
    options = ["--out", "out", "--ratio", "0.25", "--ratio", "0.5", "--no-latency"]
    said = []
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit) as end:
            cli.app(["sensitivity", "small.yaml", *options, *more])
        said.append(capfd.readouterr())
        assert not end.value.code, said[-1].err
    assert "-25 %" in said[0].out and "plot: out/sensitivity.html" in said[0].out
    assert "latency" not in said[0].out
    (family,) = json.loads(said[1].out)["families"]
    assert [point["latency"] for point in family["points"]] == [None, None]
