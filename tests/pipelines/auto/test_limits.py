"""Limits of `compress auto`: how they are written, which models miss them, and what is said."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from compress.common.errors import PipelineInvalid
from compress.pipelines.auto.candidate_evaluator import refuse_unfit_pipeline
from compress.pipelines.auto.candidates import CheckedModel
from compress.pipelines.auto.command import with_limits
from compress.pipelines.auto.cost_models import FormatModel
from compress.pipelines.auto.front import (
    Front,
    cells_of,
    chosen_points,
    front_page,
    lines_below,
    missed_limits,
    nothing_found,
    shares_of_limits,
)
from compress.pipelines.auto.search import search_log
from compress.pipelines.auto.search_state import SearchState
from compress.pipelines.config.auto_settings import AutoLimits, AutoSettings
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.system.jsonl_log import LOG, EventEmitter, LogFile, log_event, log_handler
from compress.profiling.interaction_sum import InteractionSum
from tests.pipelines.auto.test_auto import FILE, NETS, auto


def checked(name: str, latency_ms: float, drop: float = 0.0, **figures: object) -> CheckedModel:
    defaults = {"widths": {}, "predicted_ms": None, "bytes": 10**6, "loss": 0.0}
    content = {"name": name, "format": "float", "latency_ms": latency_ms, "drop": drop}
    return CheckedModel.model_validate({**defaults, **content, **figures})


def front_of(*models: CheckedModel, limits: dict[str, object], **changes: object) -> Front:
    content = {"limits": limits, "checked": models, "points": [], "conditions": "", "base_ms": 5.0}
    return Front.model_validate(content | changes)


def test_latency_is_a_median_with_its_unit_or_has_the_keys_of_the_gate() -> None:
    limits = AutoLimits.model_validate({"latency": "500us", "memory": "64MiB"})
    assert limits.latency is not None and limits.latency.p50_ms == 0.5
    assert limits.memory == 64 * 2**20
    assert limits.described == "0.5 ms a call, 64 MiB of memory"
    tail = AutoLimits.model_validate({"latency": {"p95_ms": 2}})
    assert tail.described == "2 ms in 95 of 100 calls"
    for written in (limits, tail):
        assert AutoLimits.model_validate_json(written.model_dump_json()) == written


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            "{latency: 2}",
            "auto.limits.latency: expected a number with its unit (us, µs, ms, s), as",
        ),
        ("{latency: {}}", "auto.limits.latency: expected p50_ms or p95_ms, or a median with its"),
        (
            "{latency: {p59_ms: 2}}",
            "auto.limits.latency.p59_ms: unknown key; did you mean 'p95_ms'",
        ),
        ("{latncy: 2ms}", "auto.limits.latncy: unknown key; did you mean 'latency'?"),
        ("{memory: 64}", "auto.limits.memory: expected a number with its unit (B, kB, MB, GB, KiB"),
    ],
)
def test_a_limit_that_cannot_be_read_is_refused_with_its_line(
    limits: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "net.yaml"
    file.write_text(FILE.replace("{max_drop: 5}", limits))
    with pytest.raises(PipelineInvalid) as error:
        PipelineConfig.from_yaml(file)
    assert str(error.value).startswith(f"{file}:8: {message}")


def test_the_command_line_takes_the_place_of_single_limits() -> None:
    limits = {"max_drop": 1, "latency": {"p95_ms": 3}, "size": "1MB"}
    settings = AutoSettings.model_validate({"limits": limits, "points": 3})
    found = with_limits(settings, {"latency": "2ms", "memory": "1MiB", "time": "5s", "size": None})
    assert found.limits.latency is not None
    assert (found.limits.latency.p50_ms, found.limits.latency.p95_ms) == (2, 3)
    assert (found.limits.memory, found.limits.size, found.limits.max_drop) == (2**20, 1e6, 1)
    assert (found.time, found.points) == (5, 3)
    tail = with_limits(AutoSettings(), {"p95": "2ms", "points": 2})
    assert tail.limits.latency is not None and tail.points == 2
    assert (tail.limits.latency.p50_ms, tail.limits.latency.p95_ms) == (None, 2)
    with pytest.raises(PipelineInvalid, match=r"^--p95 2: expected a number with its unit"):
        with_limits(AutoSettings(), {"p95": "2"})
    with pytest.raises(PipelineInvalid, match=r"^--memory 2ms: expected a number with its unit"):
        with_limits(AutoSettings(), {"memory": "2ms"})


def test_a_limit_whose_figure_is_not_known_is_missed() -> None:
    limits = AutoLimits.model_validate({"latency": {"p95_ms": 2}, "memory": "4MiB", "size": "1MB"})
    model = checked("a", 1.0, p95_ms=1.5, peak_mebibytes=2.0)
    assert shares_of_limits(limits, model) == {"latency": 0.75, "size": 1.0, "memory": 0.5}
    assert missed_limits(limits, model) == ()
    assert missed_limits(limits, checked("a", 1.0, p95_ms=2.5, peak_mebibytes=4.1)) == (
        "latency",
        "memory",
    )
    assert missed_limits(limits, checked("a", 1.0), but="memory") == ("latency",)
    # By the upper end of its interval, as the gate of a point does.
    median = AutoLimits.model_validate({"latency": {"p50_ms": 1.05}})
    assert missed_limits(median, checked("a", 1.0)) == ()
    assert missed_limits(median, checked("a", 1.0, latency_upper_ms=1.1)) == ("latency",)
    both = AutoLimits.model_validate({"latency": {"p50_ms": 0.8, "p95_ms": 2}})
    assert missed_limits(both, model) == ("latency",)


def test_what_is_limited_is_in_lines_and_on_the_page() -> None:
    limits = {"latency": {"p95_ms": 2}, "memory": "4MiB", "max_drop": 1}
    model = checked("a", 1.0, p95_ms=1.5, peak_mebibytes=2.0, confirmed_drop=0.25)
    changes = {"points": ["a"], "best": "a", "folders": {"a": "points/1"}, "not_searched": ["x"]}
    front = front_of(model, limits=limits, **changes)
    assert front.line(model, front.limits) == (
        "float: 1 ms, p95 1.5 ms, 1 MB, 2 MiB of memory, drop 0 points"
    )
    cells = cells_of(front, model)
    assert (cells["p95 ms"], cells["MiB memory"]) == ("1.5", "2")
    assert not {"p95 ms", "MiB memory"} & {*cells_of(front_of(model, limits={}), model)}
    served = "serve it: compress serve out/points/1/artifacts/export_onnx"
    assert served in lines_below(front, Path("out"))
    page = front_page(front)
    assert "Of the limits it takes 75 % of latency, 50 % of memory" in page
    assert "compress run points/1/pipeline.yaml" in page and "Left out: x." in page
    assert "a drop of 1 points, 2 ms in 95 of 100 calls, 4 MiB of memory" in page
    shorter = checked("a", 1.0, removed_blocks=["2.3", "2.1"])
    page = front_page(front_of(shorter, limits={}, points=["a"]))
    assert "Removed blocks: <code>2.3</code>, <code>2.1</code>." in page


def test_where_the_time_went_is_named() -> None:
    state = SearchState(SimpleNamespace(settings=AutoSettings(), out=Path()))  # type: ignore[arg-type]
    with state.timed("latency tables"), state.timed("models"):
        time.sleep(0.01)
    assert state.spent["models"] >= 0.01 > state.spent["latency tables"] >= 0
    front = front_of(limits={}, spent={"a": 0.2, "b": 12.4, "c": 99.0}, time_limit=60)
    line = "time: 112 s of the 60 s given: c 99 s, b 12 s"
    assert line in lines_below(front, Path()) and "Time: 112 s of the" in front_page(front)


def test_the_nearest_model_is_told_and_what_to_allow() -> None:
    limits = {"max_drop": 1, "latency": "1ms", "memory": "1MiB"}
    slow = checked("slow", 2.0, peak_mebibytes=0.5)
    large = checked("large", 0.9, peak_mebibytes=3.0)
    bad = checked("bad", 0.5, drop=9.0, peak_mebibytes=0.5)
    message = nothing_found(front_of(slow, large, bad, limits=limits))
    assert "no model within a drop of 1 points, 1 ms a call, 1 MiB of memory was found" in message
    assert "the nearest is float: 2 ms" in message and "allow more latency, or more" in message
    impossible = nothing_found(front_of(slow, large, limits=limits, is_infeasible=True))
    assert impossible.startswith(
        "no model can be within a drop of 1 points, 1 ms a call, 1 MiB of memory"
    )
    assert impossible.endswith("allow more latency")
    flattered = checked("f", 0.5, drop=0.5, confirmed_drop=2.0, peak_mebibytes=0.5)
    message = nothing_found(front_of(flattered, limits=limits))
    assert ", and 2 points on samples not decided by; allow more max_drop" in message
    assert "not even the float one" in nothing_found(front_of(bad, limits=limits))


def test_the_best_and_those_within_limits_get_a_folder_first() -> None:
    models = [checked(str(i), float(i), drop=9.0 if i < 4 else 0.0) for i in range(1, 10)]
    front = front_of(*models, limits={"max_drop": 1}, points=[m.name for m in models], best="6")
    assert chosen_points(front, 1) == ["6"]
    assert chosen_points(front, 3) == ["4", "6", "9"]
    assert chosen_points(front, 7) == ["1", "4", "5", "6", "7", "8", "9"]
    assert chosen_points(front, 20) == [*front.points]


def test_stages_that_cannot_follow_the_export_are_refused_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    file = tmp_path / "net.yaml"
    for after, message in (
        (
            "{stage: train, epochs: 1}",
            "the name 'train' is taken; give the stage another one with `name:`",
        ),
        ("{stage: prune_channels, ratio: 0.5}", "reads eager"),
    ):
        file.write_text(FILE.replace("stages:", f"  after: [{after}]\nstages:"))
        assert auto(file, "--out", tmp_path / "out") == 2
        error = capfd.readouterr().err
        assert error.startswith(f"error: {file}:11: auto.after[0]") and message in error
    content = yaml.safe_load(FILE)
    content["auto"]["after"] = [{"stage": "package_triton", "model_name": "net"}]
    pipeline = PipelineConfig.model_validate(content)
    refuse_unfit_pipeline(pipeline, pipeline.auto or AutoSettings())


def test_a_search_logs_its_own_events_and_leaves_those_of_runs_to_their_logs(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    model = checked("float-whole", 1.0)

    def evaluate(candidate: object, predicted_ms: object, deadline: object) -> CheckedModel:
        with log_handler(LogFile(tmp_path / "run.jsonl", "run", lambda: "train")):
            log_event("stage_started", "train: running")
        return model

    evaluator: Any = SimpleNamespace(
        settings=AutoSettings(),
        out=tmp_path / "search",
        evaluate=evaluate,
        conditions="",
        base_ms=1.0,
        tables=None,
        decided_on=SimpleNamespace(samples=30),
    )
    state = SearchState(evaluator, emit=EventEmitter(said.append))
    predicted = FormatModel("float", InteractionSum(2.0, {}), InteractionSum(1.0, {}))
    state.models["float", "onnx", ()] = predicted
    with search_log(tmp_path / "search"):
        state.check(model.candidate, 1.5)
        state.check(model.candidate, 1.5)
    lines = [*map(json.loads, (tmp_path / "search" / LOG).read_text().splitlines())]
    assert [line["event"] for line in lines] == [
        "candidate_chosen",
        "candidate_checked",
        "front_changed",
        "model_corrected",
    ]
    assert (lines[0]["candidate"], lines[0]["predicted_ms"]) == ("float-whole", 1.5)
    assert lines[0]["removed_blocks"] == [] and lines[0]["widths"] == {}
    assert lines[1]["figures"]["latency_ms"] == 1.0 and lines[3]["factor"] == 0.5
    assert lines[2]["points"] == ["float-whole"]
    assert said == [Front.line(model)]
