"""`compress auto` for OpenVINO, and for a machine that is not here."""

import json
import math
from pathlib import Path

import pytest
import yaml

from compress import cli
from compress.common.errors import PipelineInvalid
from compress.export.latency import kernels as kernel_table
from compress.pipelines.auto import candidate_evaluator
from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator
from compress.pipelines.auto.candidates import Candidate, CheckedModel
from compress.pipelines.auto.cost_models import FormatModel, LatencyTables, ModelTable
from compress.pipelines.auto.front import Front, cells_of
from compress.pipelines.auto.search_state import BlockVariant, SearchState
from compress.pipelines.config.auto_settings import AutoLimits, AutoSettings
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.config.run_options import RunOptions
from compress.profiling.interaction_sum import InteractionSum
from compress.pruning.latency.solver import Programme
from tests.pipelines.auto.test_auto import FILE, NETS, auto


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """Write a pipeline file that searches float models for both runtimes."""
    (tmp_path / "nets.py").write_text(NETS)
    space = "runtimes: [onnx, openvino], formats: [float]"
    file = tmp_path / "net.yaml"
    file.write_text(FILE.replace("formats: [float, int8_static]", space))
    return file


def run(file: Path, out: Path) -> int:
    with pytest.raises(SystemExit) as end:
        cli.app(["run", str(file), "--out", str(out), "--quiet"])
    return int(end.value.code or 0)


@pytest.mark.soak
@pytest.mark.slow
def test_models_for_openvino_are_searched_and_made_again(
    pipeline: Path, tmp_path: Path, capfd
) -> None:
    out = tmp_path / "out"
    both = pipeline.read_text()
    pipeline.write_text(both.replace("onnx, openvino", "openvino"))
    assert auto(pipeline, "--out", out, "--json") == 0
    front = json.loads(capfd.readouterr().out)
    checked = {model["name"]: model for model in front["checked"]}
    # The float ONNX file is what latencies are measured in turn with, and no point.
    assert {m["runtime"] for m in checked.values() if m["name"] != "float-whole"} == {"openvino"}
    assert "float-whole" not in front["points"]
    cut = [model for model in checked.values() if model["widths"]]
    assert cut and all(m["bytes"] < checked["float-openvino-whole"]["bytes"] for m in cut)
    # Which one is best follows from measured latencies, and on a net this small it may be any.
    best = checked[front["best"]]
    point = out / "points" / str(front["points"].index(front["best"]) + 1) / "pipeline.yaml"
    assert run(point, tmp_path / "again") == 0
    for name in ("model.xml", "model.bin"):
        made = out / "candidates" / best["name"] / "artifacts" / "export_openvino" / name
        again = tmp_path / "again" / "artifacts" / "export_openvino" / name
        assert again.read_bytes() == made.read_bytes()
    # With another runtime beside it the search goes on with what it has.
    pipeline.write_text(both)
    assert auto(pipeline, "--out", out, "--json") == 0
    more = json.loads(capfd.readouterr().out)["checked"]
    assert more[: len(checked)] == front["checked"]
    assert {m["runtime"] for m in more if m["widths"]} == {"onnx", "openvino"}


@pytest.mark.soak
def test_a_search_for_another_machine_predicts_its_latencies(
    pipeline: Path, tmp_path: Path, capfd, monkeypatch
) -> None:
    assert auto(pipeline, "--tables-only", "--out", tmp_path / "there") == 0
    assert "float in onnx, float in openvino, over" in capfd.readouterr().out
    written = tmp_path / "there" / "latency_tables.json"
    tables = LatencyTables.read(written)

    def refuse(*_: object) -> None:
        raise AssertionError("a latency is measured")

    monkeypatch.setattr(candidate_evaluator, "compare_latency", refuse)
    monkeypatch.setattr(kernel_table, "measure_kernels", refuse)
    out = tmp_path / "here"
    arguments = (pipeline, "--out", out, "--tables", written)
    assert auto(*arguments, "--json") == 0
    front = json.loads(capfd.readouterr().out)
    assert front["predicted_for"] == tables.where and front["base_ms"] == tables.base_ms
    assert f"as it is predicted for {tables.where}" in (out / "front.html").read_text()
    cut = [model for model in front["checked"] if model["widths"]]
    assert cut and all(model["is_predicted"] for model in front["checked"])
    for model in front["checked"]:
        whole = {group: widths[0] for group, widths in tables.grid.items()}
        (own,) = tables.format_models(model["format"], [model["runtime"]])
        assert model["latency_ms"] == own.latency_ms({**whole, **model["widths"]})
    # Its pipeline measures the point where it runs, beside the float ONNX file.
    point = yaml.safe_load((out / "points" / "1" / "pipeline.yaml").read_text())
    *_, float_file, export = point["stages"]
    assert float_file == {"name": "float_onnx", "stage": "export_onnx", "input": "train"}
    gate = export["gates"][-1]
    assert (gate["gate"], gate["against"]) == ("max_latency", "float_onnx")
    fastest = next(m for m in front["checked"] if m["name"] == front["points"][0])
    assert gate["p50_ms"] == pytest.approx(1.1 * fastest["latency_ms"], rel=1e-3)
    assert auto(*arguments, "--time", "1s", "--latency", "1us") == 3
    assert " ms as predicted, " in capfd.readouterr().err
    # Those of another model or other widths are refused.
    pipeline.write_text(pipeline.read_text().replace("values: 2", "values: 3"))
    assert auto(*arguments) == 2
    error = capfd.readouterr().err
    assert "the latency tables are of another model or of other widths: '0' has [48, 16]" in error


@pytest.mark.soak
@pytest.mark.slow
def test_layers_may_stay_in_float_for_openvino_alone(pipeline: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(pipeline.read_text())
    content["auto"]["space"] = {
        "widths": None,
        "formats": ["int8_static"],
        "runtimes": ["openvino"],
    }
    pipeline.write_text(yaml.safe_dump(content))
    base, out = PipelineConfig.from_yaml(pipeline), tmp_path / "out"
    assert base.auto is not None
    evaluator = CandidateEvaluator.from_pipeline(base, base.auto, out, RunOptions())
    state = SearchState(evaluator)
    state.check_whole(math.inf)
    state.measure_kernels(BlockVariant.from_model(evaluator, evaluator.model), math.inf)
    assert state.models["int8_static", "openvino", ()].layers.names
    assert not state.not_searched
    # The ONNX file that the losses are measured with is no point.
    assert "int8_static-whole" in state.checked
    whole = Candidate("int8_static", runtime="openvino")
    assert [model.candidate for model in state.offered()] == [whole]
    known = [whole]
    while len(state.offered()) == 1:  # with all layers in float nothing could be quantized
        solved = state.solve({(): Programme({}, {})}, None, known)
        assert solved is not None and solved.candidate.float_layers
        state.check(solved.candidate, solved.predicted_ms)
        known.append(solved.candidate)
    assert {m.runtime for m in state.offered() if m.float_layers} == {"openvino"}


def tables(**changes: object) -> LatencyTables:
    latency = InteractionSum(4.0, {("a",): {(4,): -1.0}, ("b",): {(4,): -1.0}})
    size = InteractionSum(100.0, {**latency.terms, ("a", "b"): {(4, 4): 0.5}})
    content = {
        "machine": {"processor": "a processor", "cores": 4},
        "versions": {"onnxruntime": "1.32.0", "openvino": "2026.4.1"},
        "threads": 1,
        "batch": 1,
        "base_ms": 5.0,
        "grid": {"a": (8, 4), "b": (8, 4)},
        "models": (ModelTable.from_model(FormatModel("int8_static", latency, size)),),
    }
    return LatencyTables.model_validate(content | changes)


def test_tables_are_read_as_they_were_written(tmp_path: Path) -> None:
    made = tables()
    assert LatencyTables.read(made.write(tmp_path)) == made
    (model,) = made.format_models("int8_static", ["onnx"])
    assert model.bytes({"a": 4, "b": 4}) == 98.5 and model.bytes({"a": 8, "b": 4}) == 99
    assert made.latency_ms(Candidate("int8_static", (("b", 4),))) == 3.0
    assert made.latency_ms(Candidate("float")) == 5.0, "it is measured in turn with all others"
    assert made.where == "a processor, 4 cores, onnxruntime 1.32.0 and openvino 2026.4.1"


def test_tables_of_other_calls_formats_or_models_are_refused(tmp_path: Path) -> None:
    settings = AutoSettings.model_validate({"space": {"formats": ["int8_static"]}})
    tables().refuse_other_settings(settings, threads=1)
    with pytest.raises(PipelineInvalid, match="of calls with threads 1, and those of the search"):
        tables().refuse_other_settings(settings, threads=2)
    with pytest.raises(PipelineInvalid, match="no float in onnx, only int8_static in onnx"):
        tables().refuse_other_settings(AutoSettings(), threads=1)
    tail = settings.model_copy(update={"limits": AutoLimits(latency={"p95_ms": 2})})
    with pytest.raises(PipelineInvalid, match="latency tables hold medians"):
        tables().refuse_other_settings(tail, threads=1)
    tables().refuse_other_model({"b": (8, 4), "a": (8, 4)}, batch=1)
    with pytest.raises(PipelineInvalid, match="of calls with batch 1, and those of the search"):
        tables().refuse_other_model(tables().grid, batch=2)
    for grid in ({"a": (8, 4)}, {"a": (8, 4), "b": (8, 2)}):
        with pytest.raises(PipelineInvalid, match=r"'b' has \[8, 4\] in them, and"):
            tables().refuse_other_model(grid, batch=1)
    file = tmp_path / "none.json"
    for content in (None, "{}", "no json"):
        if content is not None:
            file.write_text(content)
        with pytest.raises(PipelineInvalid, match="expected what `compress auto --tables-only`"):
            LatencyTables.read(file)


def test_a_predicted_latency_is_told_as_one() -> None:
    figures = {"predicted_ms": 2.5, "bytes": 10**6, "loss": 0.0, "drop": 0.0}
    model = CheckedModel(
        name="a", format="float", runtime="openvino", widths={"a": 4}, latency_ms=2, **figures
    )
    line = "float in openvino, 1 groups cut: 2 ms (predicted 2.5), 1 MB, drop 0 points"
    assert Front.line(model) == line
    predicted = model.model_copy(update={"is_predicted": True})
    assert Front.line(predicted) == line.replace("2 ms (predicted 2.5)", "2 ms as predicted")
    front = Front(limits=AutoLimits(), checked=(model,), points=(), conditions="", base_ms=5.0)
    measured, alone = cells_of(front, model), cells_of(front, predicted)
    assert (measured["ms"], measured["predicted"]) == ("2", "2.5")
    assert (alone["ms"], alone["predicted"]) == ("", "2")


def test_tables_and_measuring_them_exclude_each_other(pipeline: Path, capfd) -> None:
    assert auto(pipeline, "--tables-only", "--tables", pipeline) == 2
    assert "--tables-only measures this machine" in capfd.readouterr().err
