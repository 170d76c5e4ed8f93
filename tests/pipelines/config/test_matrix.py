"""`matrix:` in a pipeline file: names, what is repeated, and what is refused."""

import json
from pathlib import Path

import pytest

from compress.common.errors import PipelineInvalid
from compress.pipelines import Pipeline
from compress.pipelines.commands.cache_miss import why
from compress.pipelines.config.pipeline import json_schema
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.results.schema import Report
from compress.pipelines.runner.run import preview_run
from tests.pipelines.conftest import measured_briefly

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
data: {factory: "nets:data"}
stages:
"""
HALVES = HEAD.replace('data: {factory: "nets:data"}\n', "") + (
    "  - {name: thin, stage: prune_weights, matrix: {amount: [0.25, 0.5]}}\n"
    "  - {stage: export_torchscript}\n"
    "  - {name: alone, stage: export_torchscript, input: thin-amount=0.5}\n"
)


@pytest.fixture
def pipeline(tmp_path: Path):
    """Return a function that reads a pipeline with some stages."""
    (tmp_path / "nets.py").write_text(NETS)

    def read(stages: str, head: str = HEAD) -> Pipeline:
        file = tmp_path / "m.yaml"
        file.write_text(head + "".join(f"  - {line}\n" for line in stages.splitlines()))
        return Pipeline.from_yaml(file)

    return read


def _roads(pipeline: Pipeline) -> list[str]:
    return [f"{p.input} > {p.name}" for p in build_plan(pipeline).stages]


def test_a_matrix_becomes_branches_and_what_follows_is_repeated(pipeline) -> None:
    found = pipeline(
        "{stage: train, epochs: 1}\n"
        "{name: cut, stage: prune_channels, matrix: {ratio: [0.3, 0.5], importance: [l1, fpgm]}}\n"
        "{stage: export_onnx}\n"
        "{name: whole, stage: export_onnx, input: train}\n"
        "{name: script, stage: export_torchscript, input: cut}\n"
        "{name: after, stage: prune_weights, amount: 0.5, input: source}"
    )
    values = ["ratio=0.3-importance=l1", "ratio=0.3-importance=fpgm"]
    values += ["ratio=0.5-importance=l1", "ratio=0.5-importance=fpgm"]
    assert _roads(found) == [
        "source > train",
        *(f"train > cut-{v}" for v in values),
        *(f"cut-{v} > export_onnx-{v}" for v in values),
        "train > whole",
        *(f"cut-{v} > script-{v}" for v in values),
        "source > after",
    ]
    assert [s.ratio for s in found.stages[1:5]] == [0.3, 0.3, 0.5, 0.5]


def test_two_matrices_on_one_road_multiply(pipeline) -> None:
    found = pipeline(
        "{stage: prune_channels, matrix: {ratio: [0.3, 0.5]}}\n"
        "{stage: prune_weights, matrix: {amount: [0.25, 0.5]}}"
    )
    assert build_plan(found).names[2:] == tuple(
        f"prune_weights-ratio={r}-amount={a}" for r in (0.3, 0.5) for a in (0.25, 0.5)
    )


def test_names_of_other_stages_mean_those_of_the_same_branch(pipeline) -> None:
    found = pipeline(
        "{stage: train, epochs: 1}\n"
        "{name: cut, stage: prune_channels, matrix: {ratio: [0.3, 0.5]}}\n"
        "{name: thin, stage: prune_weights, amount: 0.5}\n"
        "{stage: distill, epochs: 1, teacher: cut}\n"
        "{stage: export_onnx, gates: [{gate: max_size, ratio: 2, against: thin}]}\n"
        "{name: one, stage: export_onnx, input: thin-ratio=0.5, "
        "gates: [{gate: max_size, ratio: 2, against: cut}]}"
    )
    by_name = {p.name: p for p in build_plan(found).stages}
    assert by_name["distill-ratio=0.5"].reads == ("thin-ratio=0.5", "cut-ratio=0.5")
    assert by_name["export_onnx-ratio=0.3"].needs == ("distill-ratio=0.3", "thin-ratio=0.3")
    assert by_name["one"].needs == ("thin-ratio=0.5", "cut-ratio=0.5")


def test_values_that_make_no_name_are_numbered(pipeline) -> None:
    found = pipeline(
        "{stage: prune_channels, ratio: 0.5, matrix: {finetune: [{epochs: 1}, {epochs: 2}], "
        "exclude: [['a/b'], ['a b']]}}"
    )
    assert build_plan(found).names[:2] == (
        "prune_channels-finetune=epochs=1-exclude=1",
        "prune_channels-finetune=epochs=1-exclude=2",
    )


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (
            "{stage: prune_channels, matrix: {ratoi: [0.3, 0.5]}}",
            "matrix.ratoi: unknown key; did you mean ",
        ),
        (
            "{stage: prune_channels, matrix: {ratio: [0.3, half]}}",
            "matrix.ratio[1]: expected a valid number",
        ),
        ("{stage: prune_channels, matrix: {ratio: []}}", "matrix.ratio: is empty"),
        ("{stage: prune_channels, matrix: {ratio: 0.5}}", "expected a list of values, found 0.5"),
        ("{stage: prune_channels, matrix: [0.5]}", "expected settings with lists of values"),
        ("{stage: prune_channels, matrix: {}}", "expected settings with lists of values"),
        ("{stage: prune_channels, matrix: {ratio: [0.5, 0.5]}}", "ratio[1]: 0.5 stands there tw"),
        ("{stage: prune_channels, matrix: {ratio: [0.5, '0.5']}}", "have the same settings"),
        ("{stage: prune_channels, ratio: 0.2, matrix: {ratio: [0.5]}}", "beside its matrix too"),
        ("{stage: prune_channels, matrix: {input: [source]}}", "is not a setting to vary"),
        (f"{{stage: distill, matrix: {{epochs: {list(range(1, 66))}}}}}", "has 65 branches"),
        (
            f"{{name: {'n' * 200}, stage: prune_weights, matrix: {{amount: [0.25]}}}}",
            "is too long: it has 212 bytes, expected at most 200",
        ),
        (
            f"{{name: {'n' + 'ä' * 94}, stage: prune_weights, matrix: {{amount: [0.25]}}}}",
            "is too long: it has 201 bytes, expected at most 200",
        ),
        (
            f"{{name: {'n' * 201}, stage: prune_weights, amount: 0.25}}",
            "name: the name 'nnnnnnnnnnnnnnnn'… is too long: it has 201 bytes, expected at most",
        ),
        (
            f"{{name: {'n' + 'ä' * 100}, stage: prune_weights, amount: 0.25}}",
            "name: the name 'näääääääääääääää'… is too long: it has 201 bytes, expected at most",
        ),
        (
            "{name: cut, stage: prune_channels, matrix: {ratio: [0.3, 0.5]}}\n"
            "{stage: distill, epochs: 1, input: source, teacher: cut}",
            "(distill).teacher: 'cut' is several branches; name one of cut-ratio=0.3, cut-ratio",
        ),
        (
            "{stage: prune_channels, matrix: {ratio: [0.3]}}\n"
            "{stage: export_onnx, input: prune_channels-ratio=0.4}",
            "no earlier stage is named 'prune_channels-ratio=0.4'; did you mean",
        ),
    ],
)
def test_what_is_wrong_with_a_matrix_is_one_line(pipeline, stages: str, message: str) -> None:
    with pytest.raises(PipelineInvalid) as error:
        build_plan(pipeline(stages))
    (line,) = str(error.value).splitlines()
    assert message in line
    assert "m.yaml:" in line
    assert "stages[" in line


def test_a_stage_trained_in_several_ways_is_no_baseline(pipeline) -> None:
    found = pipeline("{stage: train, matrix: {epochs: [1, 2]}}")
    assert build_plan(found).baseline == "source"


def test_the_schema_takes_a_matrix_in_the_place_of_a_required_setting() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = json_schema()
    model = {"factory": "a:b", "inputs": [{"name": "x", "shape": [1]}]}

    def problems(**stage) -> list[str]:
        content = {"version": 1, "model": model, "stages": [stage]}
        return [e.message for e in jsonschema.Draft202012Validator(schema).iter_errors(content)]

    assert not problems(stage="train", matrix={"epochs": [1, 2]})
    assert problems(stage="train")
    assert problems(stage="train", matrix={"epochs": []})
    assert problems(stage="train", matrix={"epoch": [1]})
    assert problems(stage="train", matrix={"epochs": ["many"]})


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """Return the folder of a pipeline with a matrix that has been run."""
    folder = tmp_path_factory.mktemp("matrix")
    (folder / "nets.py").write_text(NETS)
    (folder / "halves.yaml").write_text(HALVES)
    with measured_briefly():
        Pipeline.from_yaml(folder / "halves.yaml").run(folder / "out")
    return folder


def test_a_branch_and_a_stage_written_out_share_their_artifact(ran, monkeypatch) -> None:
    written = HALVES.replace("matrix: {amount: [0.25, 0.5]}", "amount: 0.5").replace(
        "thin-amount=0.5", "thin"
    )
    (ran / "written.yaml").write_text(written)
    pipeline = Pipeline.from_yaml(ran / "written.yaml")
    assert set(preview_run(pipeline, ran / "out").values()) == {"cached"}


def test_options_and_explanations_take_the_names_of_branches(ran) -> None:
    pipeline, out = Pipeline.from_yaml(ran / "halves.yaml"), ran / "out"
    assert why(pipeline, out, "export_torchscript-amount=0.25").does == "cached"
    options = RunOptions(start="thin-amount=0.5", until="export_torchscript")
    foreseen = preview_run(pipeline, out, options)
    assert foreseen == {
        "source": "cached",
        "thin-amount=0.25": "cached",
        "thin-amount=0.5": "runs (asked to run again)",
        "export_torchscript-amount=0.25": "cached",
        "export_torchscript-amount=0.5": "runs (asked to run again)",
    }


def test_the_report_names_the_branch_of_each_stage(ran) -> None:
    report = Report.read(ran / "out")
    roads = {s.name: s.branch for s in report.stages}
    assert roads["export_torchscript-amount=0.5"] == ("source", "thin-amount=0.5")
    assert roads["alone"] == ("source", "thin-amount=0.5")
    lock = json.loads((ran / "out" / "lock.json").read_text())
    assert [s["name"] for s in lock["settings"]["stages"]] == [
        "thin-amount=0.25",
        "thin-amount=0.5",
        "export_torchscript-amount=0.25",
        "export_torchscript-amount=0.5",
        "alone",
    ]
    assert (ran / "out" / "artifacts" / "export_torchscript-amount=0.5" / "manifest.json").exists()
