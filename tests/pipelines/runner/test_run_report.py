"""Warnings of what no gate judges: losses, wrong calibration sets, data that prove little."""

import json
import math
import re

import pytest
import torch
from torch.utils.data import TensorDataset

from compress.common.errors import GateRefused
from compress.core.metrics import Metric
from compress.core.objectives.loss import Loss
from compress.data.splits import Splits
from compress.pipelines import Pipeline
from compress.pipelines.commands.check import check_pipeline
from compress.pipelines.planning.plan import accuracy_drops, is_much
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.reporting.terminal_table import closing_lines
from compress.pipelines.results.schema import Report
from compress.pipelines.runner.run import constant_score, unlike_val
from compress.pipelines.runner.run_state import validation_data_warnings
from compress.pipelines.system.jsonl_log import LOG
from tests.compress.data.augmented import data
from tests.pipelines.conftest import NETS, Project

CALIBRATED = (
    NETS
    + """
def raw(factor=255.0):
    splits = data()
    x, y = splits["train"].tensors
    return {**splits, "calibration": TensorDataset(x * factor, y)}
"""
)
FILE = """\
version: 1
model: {factory: "nets:mlp", inputs: [{name: x, shape: [batch, 4]}]}
data: {factory: "nets:raw"}
stages:
  - {stage: train, epochs: 3, batch_size: 24}
  - {name: int8, stage: quantize_static, calibration_samples: 64}
  - {stage: export_torchscript, input: train}
"""


@pytest.fixture
def calibrated(tmp_path) -> Project:
    """Return a project that calibrates on other inputs than it is asked."""
    (tmp_path / "nets.py").write_text(CALIBRATED)
    (tmp_path / "small.yaml").write_text(FILE)
    return Project(tmp_path)


def test_a_wrong_calibration_set_is_named_where_no_gate_judges(calibrated) -> None:
    report = calibrated.run()
    assert report.status == "passed"
    (warning,) = [w for w in report.warnings if w.startswith("int8: accuracy")]
    assert "points worse than that of train" in warning
    assert "which no gate judges (add {gate: max_drop, points: …})" in warning
    assert "scale the samples of calibration as those of val" in warning
    found = re.search(r"calibration inputs are (\S+) ± (\S+) .*, val (\S+) ± (\S+): scale", warning)
    assert found
    mean, deviation, val_mean, val_deviation = map(float, found.groups())
    assert 200 < deviation / val_deviation < 300
    assert 200 < mean / val_mean < 300
    content = json.loads((calibrated.out / "report.json").read_text())
    assert warning in content["warnings"]
    assert warning in Report.read(calibrated.out).warnings
    assert f"! {warning}" in [str(line) for line in closing_lines(report, calibrated.out)]
    assert "calibration inputs are" in (calibrated.out / "report.html").read_text()
    events = [json.loads(line) for line in (calibrated.out / LOG).read_text().splitlines()]
    assert [e["level"] for e in events if e["message"] == warning] == ["warning"]
    assert not [w for w in report.warnings if w.startswith("export_torchscript: accuracy")]


@pytest.mark.slow
def test_a_right_calibration_set_is_not_warned_of(calibrated) -> None:
    calibrated.edit('factory: "nets:raw"', 'factory: "nets:raw", arguments: {factor: 1.0}')
    assert not [w for w in calibrated.run().warnings if w.startswith("int8: accuracy")]


def test_a_refusal_names_its_likely_cause(calibrated) -> None:
    calibrated.edit("samples: 64}", "samples: 64, gates: [{gate: max_drop, points: 1}]}")
    with pytest.raises(GateRefused):
        calibrated.run()
    (warning,) = [w for w in Report.read(calibrated.out).warnings if w.startswith("int8: accuracy")]
    assert "calibration inputs are" in warning
    assert "no gate judges" not in warning


def test_without_a_metric_a_run_names_what_nothing_judges(calibrated) -> None:
    line = (
        "no gate judges what int8 may cost in accuracy, and there is no metric; add gates: "
        "[{gate: parity, atol: …, against: source}] to int8"
    )
    calibrated.edit("stages:", "metric: none\nstages:")
    calibrated.edit("  - {stage: train, epochs: 3, batch_size: 24}\n", "")
    calibrated.edit("input: train", "input: source")
    assert line in calibrated.run().warnings
    file = calibrated.out.parent / "small.yaml"
    assert check_pipeline(file, models=False).warnings == (line,)
    calibrated.edit(
        "samples: 64}", "samples: 64, gates: [{gate: parity, atol: 99, against: source}]}"
    )
    assert check_pipeline(file, models=False).warnings == ()


def plan_of(tmp_path, *stages: str):
    """Return the plan of a pipeline with these stages."""
    lines = "".join(f"  - {{{stage}}}\n" for stage in stages)
    head = FILE.partition("stages:\n")[0]
    (tmp_path / "nets.py").write_text(CALIBRATED)
    (tmp_path / "p.yaml").write_text(f"{head}stages:\n{lines}")
    return build_plan(Pipeline.from_yaml(tmp_path / "p.yaml"))


TRAIN = "stage: train, epochs: 1"
PRUNE = "name: cut, stage: prune_channels, ratio: 0.3"
INT8 = "name: int8, stage: quantize_static"
ONNX = "name: onnx, stage: export_onnx"


def advised(tmp_path, *stages: str) -> tuple[str, ...]:
    plan_of(tmp_path, *stages)
    content, _, warnings = check_pipeline(tmp_path / "p.yaml", models=False)
    assert tuple(content["warnings"]) == warnings
    return warnings


@pytest.mark.parametrize(
    ("stages", "names", "where"),
    [
        ((TRAIN, PRUNE, INT8, ONNX), "cut, int8", "onnx"),
        ((TRAIN, PRUNE, INT8, f"{ONNX}, gates: [{{gate: parity, atol: 1}}]"), "cut, int8", "onnx"),
        ((TRAIN, PRUNE, f"{INT8}, gates: [{{gate: max_drop, points: 1}}]", ONNX), "cut", "onnx"),
        ((TRAIN, f"{PRUNE}, gates: [{{gate: max_size, ratio: 1}}]"), "cut", "cut"),
        ((TRAIN, f"{PRUNE}, gates: [{{gate: max_drop, points: 1}}]", INT8), "int8", "int8"),
    ],
)
def test_a_gate_is_advised_where_none_judges_accuracy(tmp_path, stages, names, where) -> None:
    (line,) = advised(tmp_path, *stages)
    assert line.startswith(f"no gate judges what {names} may cost in accuracy; add gates: ")
    assert line.endswith(f"[{{gate: max_drop, points: 1, against: train}}] to {where}")


@pytest.mark.parametrize(
    "gate",
    [
        "gate: max_drop, points: 1, against: train",
        "gate: min_metric, at: 0.9",
        "gate: label_agreement, minimum: 0.9, against: train",
    ],
)
def test_one_gate_on_the_end_judges_the_whole_road(tmp_path, gate) -> None:
    assert advised(tmp_path, TRAIN, PRUNE, INT8, f"{ONNX}, gates: [{{{gate}}}]") == ()


def test_what_changes_no_numbers_needs_no_gate(tmp_path) -> None:
    assert advised(tmp_path, TRAIN, ONNX) == ()


def found(plan, **values: float) -> list[tuple[str, str]]:
    return [(drop.stage, drop.since) for drop in accuracy_drops(plan, Metric(), values)]


def test_a_drop_is_reported_once_and_at_its_stage(tmp_path) -> None:
    plan = plan_of(tmp_path, TRAIN, PRUNE, INT8, ONNX)
    assert found(plan, train=0.99, cut=0.98, int8=0.975, onnx=0.975) == [("int8", "train")]
    assert found(plan, train=0.99, cut=0.9, int8=0.9, onnx=0.895) == [("cut", "train")]
    assert found(plan, train=0.99, cut=0.99, int8=0.5, onnx=0.1) == [
        ("int8", "cut"),
        ("onnx", "int8"),
    ]
    assert found(plan, train=0.99, cut=0.98, int8=0.98, onnx=0.98) == []


def test_what_a_gate_has_allowed_is_no_fall_of_later_stages(tmp_path) -> None:
    gate = "gates: [{gate: max_drop, points: 3}]"
    plan = plan_of(tmp_path, TRAIN, f"{PRUNE}, {gate}", ONNX)
    assert found(plan, train=0.99, cut=0.97, onnx=0.97) == [("cut", "train")]
    (drop,) = accuracy_drops(plan, Metric(), {"train": 0.99, "cut": 0.97, "onnx": 0.97})
    assert drop.is_judged


def test_much_is_a_point_or_two_percent() -> None:
    assert not is_much(Metric(), 0.98, 0.97)
    assert is_much(Metric(), 0.98, 0.9699)
    assert not is_much(Metric("loss"), 2.0, 2.04)
    assert is_much(Metric("loss"), 2.0, 2.05)
    assert not is_much(Metric("loss"), 2.0, 1.0)
    above_one = Metric("mine:score", direction=True)
    assert not is_much(above_one, 30.0, 29.5)
    assert is_much(above_one, 30.0, 29.3)


def splits(**samples: torch.Tensor) -> Splits:
    return Splits({n: TensorDataset(x, torch.zeros(len(x)).long()) for n, x in samples.items()})


def doubts(data: Splits) -> list[str]:
    return list(validation_data_warnings(data.contents()))


def test_samples_in_two_splits_are_counted() -> None:
    x = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    shared = splits(train=x[:100], val=x[95:195], test=x[200:])
    (line,) = doubts(shared)
    assert line.startswith("val shares 5 of its 100 samples with train")
    (line,) = doubts(splits(train=x[:100], val=x[100:200], test=x[150:]))
    assert line.startswith("val shares 50 of its 100 samples with test")
    assert doubts(splits(train=x[:100], val=x[100:200], test=x[200:])) == []


def test_samples_that_no_seed_repeats_are_one_warning() -> None:
    (line,) = doubts(Splits(data("system")))
    assert line.startswith("the same sample of split 'train' differs each time it is read")
    assert doubts(Splits(data("numpy"))) == []


def test_a_small_val_is_doubted() -> None:
    x = torch.randn(100, 4)
    (line,) = doubts(splits(train=x[:50], val=x[50:79]))
    assert line == "val has 29 samples, so that one of them moves an accuracy by 3.4 points; " + (
        "use at least 30"
    )
    assert doubts(splits(train=x[:50], val=x[50:80])) == []
    assert doubts(splits(train=x[:50])) == []


@pytest.mark.parametrize(("factor", "differs"), [(1, False), (255, True), (1 / 16, True)])
def test_ranges_of_calibration_and_val_are_compared(factor: float, differs: bool) -> None:
    x = torch.rand(200, 4, generator=torch.Generator().manual_seed(0))
    warning = unlike_val(splits(train=x[:100] * factor, val=x[100:]), 50, seed=0)
    assert bool(warning) is differs
    if factor == 255:
        assert "calibration inputs are 1" in warning and " ± 7" in warning


def labelled(y: torch.Tensor) -> Splits:
    return Splits({"val": TensorDataset(torch.zeros(len(y), 2), y)}, batch_size=7)


def test_what_a_constant_answer_reaches() -> None:
    y = torch.tensor([1] * 60 + [0] * 30 + [2] * 10)
    assert constant_score(labelled(y), Metric()) == 0.6
    entropy = -sum(p * math.log(p) for p in (0.6, 0.3, 0.1))
    assert constant_score(labelled(y), Metric("loss")) == pytest.approx(entropy, abs=1e-5)
    squares = Metric("torchmetrics.MeanSquaredError")
    targets = torch.randn(50, 1)
    variance = float(targets.var(correction=0))
    assert constant_score(labelled(targets), squares) == pytest.approx(variance, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(100,), (100, 1), (100, 4)])
def test_what_a_constant_answer_to_yes_or_no_reaches(dtype, shape) -> None:
    one_in_20 = (torch.arange(100) % 20 == 0).view(100, *(1 for _ in shape[1:]))
    data, loss = labelled(one_in_20.expand(shape).to(dtype)), Loss("binary_cross_entropy")
    assert constant_score(data, Metric(loss=loss)) == pytest.approx(0.95)
    entropy = -sum(p * math.log(p) for p in (0.05, 0.95))
    assert constant_score(data, Metric("loss", loss=loss)) == pytest.approx(entropy, abs=1e-4)


def test_a_constant_answer_to_boolean_labels_of_two_classes() -> None:
    data = labelled(torch.arange(100) % 4 == 0)
    assert constant_score(data, Metric(loss=Loss("cross_entropy"))) == pytest.approx(0.75)


def test_the_median_is_the_constant_answer_of_absolute_errors() -> None:
    data = labelled(torch.tensor([0.0] * 9 + [10.0])[:, None])
    assert constant_score(data, Metric("mae")) == pytest.approx(1.0)
    assert constant_score(data, Metric("mse")) == pytest.approx(9.0)


def test_a_metric_that_wants_other_outputs_has_no_constant_answer() -> None:
    y = torch.tensor([0, 1] * 20)
    assert constant_score(labelled(y), Metric("torchmetrics.classification.BinaryF1Score")) is None
    assert constant_score(labelled(y), Metric("fidelity")) is None


@pytest.mark.slow
def test_a_model_no_better_than_a_constant_is_warned_of(project) -> None:
    flat = "\ndef flat():\n    net = mlp()\n    nn.init.zeros_(net[2].weight)\n    return net\n"
    nets = project.folder / "nets.py"
    nets.write_text(nets.read_text() + flat)
    project.edit("nets:mlp", "nets:flat")
    project.edit("  - {stage: train, epochs: 3, batch_size: 24}\n", "")
    warnings = project.run().warnings
    (line,) = [w for w in warnings if "one and the same answer" in w]
    assert line.startswith("source, prune_channels, export_onnx: accuracy is no better than")
    assert "(0.3333 on val)" in line


def test_a_model_that_learns_is_not_warned_of(finished_run) -> None:
    assert not [w for w in Report.read(finished_run.out).warnings if "the same answer" in w]
