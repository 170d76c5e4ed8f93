"""`--from` and `--until` where the road branches: what is run again, and what is left out."""

from pathlib import Path

import pytest

from compress.common.errors import PipelineInvalid
from compress.pipelines import Pipeline
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.runner.run import preview_run
from compress.profiling.benchmark import compare_latencies

NETS = """
from torch import nn

def mlp(hidden=16):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))
"""
HEAD = """\
version: 1
model:
  factory: nets:mlp
  inputs: [{name: x, shape: [batch, 4]}]
"""
SCHOOL = HEAD + (
    'data: {factory: "nets:data"}\n'
    "stages:\n"
    "  - {stage: train, epochs: 1}\n"
    "  - {name: wide, stage: prune_weights, amount: 0.1}\n"
    "  - {name: thin, stage: prune_channels, input: train, ratio: 0.5}\n"
    "  - {name: taught, stage: distill, epochs: 1, teacher: wide}\n"
    "  - {name: beside, stage: export_onnx, input: train}\n"
    "  - name: onnx\n"
    "    stage: export_onnx\n"
    "    input: taught\n"
    "    gates: [{gate: max_size, ratio: 2, against: beside}]\n"
    "  - {name: alone, stage: export_onnx, input: source}\n"
)
TWO = HEAD + (
    "stages:\n"
    "  - {name: cut, stage: prune_weights, matrix: {amount: [0.25, 0.5]}}\n"
    "  - {name: script, stage: export_torchscript}\n"
    "  - {name: whole, stage: export_torchscript, input: source}\n"
)
CUT, SCRIPT = ({f"{name}-amount={a}" for a in (0.25, 0.5)} for name in ("cut", "script"))


@pytest.fixture
def read(tmp_path: Path):
    """Return a function that reads a pipeline."""
    (tmp_path / "nets.py").write_text(NETS)

    def read(text: str) -> Pipeline:
        (tmp_path / "p.yaml").write_text(text)
        return Pipeline.from_yaml(tmp_path / "p.yaml")

    return read


@pytest.mark.parametrize(
    ("start", "again"),
    [
        ("train", "train wide thin taught beside onnx"),
        ("wide", "wide taught onnx"),  # of a teacher too is made what it teaches
        ("thin", "thin taught onnx"),
        ("beside", "beside"),  # what a gate compares with it is not made of it
        ("alone", "alone"),
    ],
)
def test_from_runs_again_what_is_made_of_a_stage(read, start, again) -> None:
    plan = build_plan(read(SCHOOL), start)
    assert plan.again == {*again.split()}
    assert len(plan.names) == 7 and not plan.cut


@pytest.mark.parametrize(
    ("until", "needed"),
    [
        ("train", "train"),
        ("thin", "train thin"),
        ("taught", "train wide thin taught"),
        ("onnx", "train wide thin taught beside onnx"),  # its gate compares it with `beside`
        ("alone", "train alone"),  # what all is compared with stays
    ],
)
def test_until_runs_what_a_stage_needs(read, until, needed) -> None:
    plan = build_plan(read(SCHOOL), until=until)
    assert plan.names == tuple(needed.split())
    assert plan.cut and not plan.again and plan.baseline == "train"


def test_what_all_is_compared_with_is_the_same_in_a_part(read) -> None:
    two = SCHOOL.replace("{name: alone, stage: export_onnx,", "{name: b, stage: train, epochs: 2,")
    whole, part = build_plan(read(two)), build_plan(read(two), until="thin")
    assert whole.baseline == part.baseline == "source"


def test_a_stage_of_the_file_means_all_its_branches(read) -> None:
    pipeline = read(TWO)
    assert build_plan(pipeline, "cut").again == CUT | SCRIPT
    assert build_plan(pipeline, "cut-amount=0.5").again == {"cut-amount=0.5", "script-amount=0.5"}
    assert {*build_plan(pipeline, until="script").names} == CUT | SCRIPT
    assert build_plan(pipeline, until="script-amount=0.5").names == (
        "cut-amount=0.5",
        "script-amount=0.5",
    )
    with pytest.raises(PipelineInvalid, match=r"--until 'scrip': .*mean 'script'") as found:
        build_plan(pipeline, until="scrip")
    assert "\n" not in str(found.value)


def test_what_the_other_option_leaves_out_is_refused(read) -> None:
    with pytest.raises(PipelineInvalid, match=r"--until 'whole' needs nothing of --from 'cut'"):
        build_plan(read(TWO), "cut", "whole")
    assert build_plan(read(TWO), "cut", "script-amount=0.5").again >= {"cut-amount=0.5"}


def test_what_is_foreseen_is_what_runs(read, monkeypatch) -> None:
    monkeypatch.setattr(compare_latencies, "__defaults__", (0.001,))
    pipeline, out = read(TWO), read(TWO).folder / "out"

    def ran(**options) -> set[str]:
        foreseen = preview_run(pipeline, out, RunOptions(**options))
        said: list[str] = []
        report = pipeline.run(out, announce=said.append, **options)
        found = {line.partition(": ")[0] for line in said if ": running (" in line}
        assert found == {name for name, what in foreseen.items() if what.startswith("runs")}
        assert {"source", *(row.name for row in report.stages)} == {*foreseen}
        return found

    assert ran(until="script-amount=0.5") == {"source", "cut-amount=0.5", "script-amount=0.5"}
    assert ran() == {"cut-amount=0.25", "script-amount=0.25", "whole"}
    assert ran(start="cut-amount=0.25") == {"cut-amount=0.25", "script-amount=0.25"}
    assert ran(start="cut", until="cut-amount=0.25") == {"cut-amount=0.25"}
    assert ran(until="cut", force=True) == {"source"} | CUT
