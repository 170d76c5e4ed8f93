"""Data that no figure can be trusted of: each kind is refused, or named in the report."""

from pathlib import Path

import pytest

from compress.common.errors import PipelineInvalid
from compress.pipelines import Pipeline
from compress.pipelines.reporting.stage_rows import headline
from compress.pipelines.reporting.terminal_table import closing_lines
from compress.pipelines.results.schema import Report
from compress.pipelines.runner.inputs import check_model

from .conftest import Project


def change_data(project: Project, lines: str) -> Project:
    """Change the samples `x` and labels `y` of the project before they are split."""
    file = project.folder / "nets.py"
    text = file.read_text()
    before = '    parts = {"train"'
    assert text.count(before) == 1
    file.write_text(text.replace(before, f"    {lines}\n{before}"))
    return project


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            "y = y + 1",
            "split 'test', sample 2: label 3 is out of range: the model has 3 classes",
        ),
        ("y[127] = 11", "split 'val', sample 7: label 11 is out of range"),
        ("y[180] = -1", "split 'test', sample 0: label -1 is out of range"),
        ("x[123, 1] = float('nan')", "split 'val', sample 3: an input holds NaN, and so does the"),
    ],
)
def test_check_and_run_name_the_sample_that_is_wrong(project, lines: str, reason: str) -> None:
    change_data(project, lines)
    with pytest.raises(PipelineInvalid, match=reason):
        check_model(Pipeline.from_yaml(project.file))
    with pytest.raises(PipelineInvalid, match=reason):
        project.run()
    assert not (project.out / "artifacts" / "train").exists()


@pytest.mark.parametrize("ranks_by_labels", [False, True])
def test_labels_of_calibration_count_where_a_stage_reads_them(project, ranks_by_labels) -> None:
    change_data(project, "y[:20] = 99")
    nets = project.folder / "nets.py"
    parts = '"train": slice(20, 120), "calibration": slice(0, 20)'
    nets.write_text(nets.read_text().replace('"train": slice(0, 120)', parts))
    if not ranks_by_labels:
        check_model(Pipeline.from_yaml(project.file))
        return
    project.edit("ratio: 0.4", "ratio: 0.4\n    importance: taylor")
    with pytest.raises(PipelineInvalid, match="split 'calibration', sample 0: label 99 is out of"):
        check_model(Pipeline.from_yaml(project.file))


def test_ignored_labels_are_no_wrong_ones_and_do_not_count_as_samples(project) -> None:
    change_data(project, "y[125:180] = -100")
    report = project.run()
    assert any("val has 5 samples with a label" in warning for warning in report.warnings)
    assert report.baseline and report.baseline.metric and report.baseline.metric.samples == 5


@pytest.mark.parametrize("kind", ["double", pytest.param("half", marks=pytest.mark.soak)])
def test_samples_of_other_floats_are_converted(project, kind: str) -> None:
    change_data(project, f"x = x.{kind}()")
    assert project.run().status == "passed"


@pytest.mark.parametrize(
    ("kind", "advice"),
    [("uint8", r"permute\(2, 0, 1\).float\(\) / 255"), ("float32", r"permute\(2, 0, 1\) of each")],
)
def test_images_with_their_channels_last_are_named(project, kind: str, advice: str) -> None:
    change_data(project, f"x = torch.ones(240, 8, 8, 3, dtype=torch.{kind})")
    nets = project.folder / "nets.py"
    layers = "nn.Conv2d(3, hidden, 8), nn.Flatten(), nn.Linear(hidden, 3)"
    before = "nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3)"
    nets.write_text(nets.read_text().replace(before, layers))
    project.edit("shape: [batch, 4]", "shape: [batch, 3, 8, 8]")
    found = rf"split 'train', {kind} \[n, 8, 8, 3\]: .*channels last, .*{advice}"
    with pytest.raises(PipelineInvalid, match=found):
        check_model(Pipeline.from_yaml(project.file))


def test_check_refuses_a_training_on_two_machines_that_was_started_on_one(project) -> None:
    project.edit("batch_size: 24", "batch_size: 24, parallel: {nodes: 2}")
    with pytest.raises(PipelineInvalid, match=r"nodes: 2 .* run on every machine: torchrun"):
        check_model(Pipeline.from_yaml(project.file))


@pytest.mark.soak
def test_what_is_no_better_than_chance_is_not_deployed(project) -> None:
    change_data(project, "y = y[torch.randperm(240, generator=generator)]")
    report = project.run()
    assert report.status == "passed" and "no better than" in " ".join(report.warnings)
    assert set(report.accuracy_doubts) >= {"train", "prune_channels", "export_onnx"}
    assert headline(report) is None
    lines = [line.plain for line in closing_lines(report, Path("out"))]
    assert lines[-1].startswith("nothing to deploy: a warning is about the accuracy of ")
    page = (project.out / "report.html").read_text()
    assert ": deploy " not in page and "Artifacts to deploy" not in page


def test_test_that_differs_beyond_chance_is_named(project) -> None:
    change_data(project, "y[180:] = (y[180:] + (torch.arange(60) < 30)) % 3")
    report = project.run()
    (line,) = [x for x in report.warnings if x.startswith("export_onnx: accuracy is 0.9")]
    assert "on val (60 samples; 95 %: " in line and "beyond what chance explains" in line
    assert report.test and report.test.samples == 60
    assert headline(report) is None
    again = Report.read(project.out)
    assert again.accuracy_doubts == report.accuracy_doubts


def test_splits_that_share_samples_are_named_whatever_their_labels_type(project) -> None:
    file = project.folder / "nets.py"
    text = file.read_text()
    text = text.replace("return {name:", "made = {name:").rstrip()
    file.write_text(
        f'{text}\n    made["val"] = TensorDataset(x[50:130], y[50:130].to(torch.uint8))\n'
        '    made["test"] = TensorDataset(x[100:200], y[100:200])\n    return made\n'
    )
    warnings = project.run().warnings
    for shared in (
        "val shares 70 of its 80 samples with train",
        "test shares 20 of its 100 samples with train",
    ):
        assert any(warning.startswith(shared) for warning in warnings), warnings
    assert any(
        warning.startswith("val shares 30 of its 80 samples with test") for warning in warnings
    )


@pytest.mark.parametrize(
    ("loss", "is_warned"),
    [
        ("cross_entropy(o, y)", False),
        ("cross_entropy(o, y, reduction='sum')", True),
        ("cross_entropy(o, y, ignore_index=0)", True),
    ],
)
def test_an_own_loss_that_is_no_mean_over_samples_is_named(project, loss, is_warned) -> None:
    with (project.folder / "nets.py").open("a") as file:
        file.write(f"\n\ndef own(o, y):\n    return nn.functional.{loss}\n")
    project.edit("stages:", "loss: nets:own\nstages:")
    _, lines, _ = check_model(Pipeline.from_yaml(project.file))
    assert ("nets:own is no mean over samples: " in lines) is is_warned


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_own_loss_may_be_a_module(project, reduction: str) -> None:
    with (project.folder / "nets.py").open("a") as file:
        file.write(
            "\n\nclass Own(nn.Module):\n    def forward(self, o, y):\n"
            f"        return nn.functional.cross_entropy(o, y, reduction='{reduction}')\n"
            "\n\nown = Own()\n"
        )
    project.edit("stages:", "loss: nets:own\nstages:")
    _, lines, _ = check_model(Pipeline.from_yaml(project.file))
    assert ("nets:own is no mean over samples: " in lines) is (reduction == "sum")
