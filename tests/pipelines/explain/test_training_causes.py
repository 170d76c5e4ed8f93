"""`compress explain` and `compress repair` on trainings that reach less than a gate asks for."""

from pathlib import Path

import pytest

from compress.pipelines.results.explanation import Explanations
from compress.pipelines.results.schema import Report
from tests.pipelines.conftest import NETS, measured_briefly
from tests.pipelines.explain.test_explain import compress

FILE = """\
version: 1
model:
  factory: nets:mlp
  inputs: [{name: x, shape: [batch, 4]}]
data: {factory: "nets:data"}
metric: accuracy
stages:
"""
TRAIN = """\
  - {stage: train, epochs: 4, batch_size: 24, SETTINGS, gates: [{gate: min_metric, at: 0.9}]}
"""


def explained(folder: Path, stages: str, nets: str = NETS):
    """Return what is explained of a pipeline that a gate refuses."""
    (folder / "nets.py").write_text(nets)
    (folder / "net.yaml").write_text(FILE + stages)
    out = folder / "out"
    with measured_briefly():
        assert compress("run", folder / "net.yaml", "--out", out) == 3
        assert compress("explain", out) == 0
    found = Explanations.read(out, Report.read(out))
    assert found is not None
    (explanation,) = found.explanations
    return explanation


@pytest.mark.slow
def test_a_training_that_has_not_converged_is_repaired_where_training_is_allowed(
    tmp_path: Path, capfd
) -> None:
    found = explained(tmp_path, TRAIN.replace("SETTINGS", "learning_rate: 0.0005"))
    assert (found.culprit, found.causes[0].cause) == ("train", "not_converged")
    assert found.causes[0].returned > 0.1, "it was trained again without the cause"
    out = tmp_path / "out"
    with measured_briefly():
        assert compress("repair", out) == 3
        assert "no repair is known" in capfd.readouterr().err
        assert compress("repair", out, "--allow", "train") == 0
    repaired = Explanations.read(out, Report.read(out))
    assert repaired is not None and repaired.chosen is not None
    assert "learning_rate" in repaired.chosen["train"] or repaired.chosen["train"]["epochs"] > 4


def test_steps_that_are_too_long_are_named(tmp_path: Path) -> None:
    settings = "optimizer: adam, learning_rate: 300, schedule: constant"
    found = explained(tmp_path, TRAIN.replace("SETTINGS", settings).replace("0.9", "0.99"))
    assert found.causes[0].cause == "learning_rate_too_high"
    assert found.repairs[0] == {"learning_rate": None}


def test_inputs_in_other_units_are_named_without_another_training(tmp_path: Path) -> None:
    raw = "\n    x[:120] = 100 * x[:120] + 300\n    parts ="
    nets = NETS.replace("\n    parts =", raw)
    found = explained(tmp_path, TRAIN.replace("SETTINGS", "learning_rate: 0.0001"), nets)
    keys = [cause.cause for cause in found.causes]
    assert keys[0] == "train_unlike_val"


@pytest.mark.slow
def test_a_teacher_that_is_worse_than_what_is_asked_is_named(tmp_path: Path) -> None:
    good = "  - {stage: train, epochs: 6, batch_size: 24, learning_rate: 0.1}\n"
    stages = good + (
        "  - {stage: distill, teacher: source, epochs: 3, batch_size: 24, hard_weight: 0,\n"
        "     student: {factory: nets:mlp, arguments: {hidden: 16}},\n"
        "     gates: [{gate: max_drop, points: 5, against: train}]}\n"
    )
    found = explained(tmp_path, stages)
    assert (found.culprit, found.causes[0].cause) == ("distill", "teacher_worse")
    assert found.repairs[0] == {"teacher": "train"}
    assert found.causes[0].returned == pytest.approx(1)
