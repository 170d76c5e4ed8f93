"""Runs of a search's points: what their gates limit, and refusals on a machine that is busy."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from compress import cli
from compress.common.errors import GateRefused, StageFailed
from compress.core.gates.cost import MaxLatency
from compress.pipelines.api import Pipeline
from compress.pipelines.auto.front import Refusal, folder_of, lines_below, run_point, write_point
from compress.pipelines.auto.search_state import SearchState
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.config.run_options import RunOptions
from compress.profiling.benchmark import NotMeasurable
from tests.pipelines.auto.test_auto import FILE, NETS
from tests.pipelines.auto.test_limits import checked, front_of

LATENCY, DROP = MaxLatency(p50_ms=1), SimpleNamespace(passed=False, gate="max_drop")


def evaluator_of(out: Path, said: list[str], **limits: object) -> Any:
    content = yaml.safe_load(FILE)
    content["auto"]["limits"] = limits
    base = PipelineConfig.model_validate(content)
    options = RunOptions(announce=said.append)
    return SimpleNamespace(
        base=base, settings=base.auto, batch=1, base_ms=1.81, tables=None, out=out, options=options
    )


def refuse_runs(monkeypatch: pytest.MonkeyPatch, *outcomes: object) -> Iterator[object]:
    """Let runs end with a verdict that refuses, with an error, or pass."""
    left = iter(outcomes)

    def run(self: Pipeline, folder: Path, options: RunOptions) -> None:
        outcome: Any = next(left)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            stages = [SimpleNamespace(verdicts=[SimpleNamespace(passed=True), outcome])]
            options.finished(SimpleNamespace(stages=stages))  # type: ignore[arg-type]
            raise GateRefused(f"export_onnx: {outcome.gate}")

    monkeypatch.setattr(Pipeline, "run", run)
    return left


def test_a_point_is_gated_by_what_was_asked_and_not_by_a_ratio(tmp_path: Path) -> None:
    limits = {"latency": {"p50_ms": 1.23456, "p95_ms": 2}}
    evaluator, model = evaluator_of(tmp_path, [], **limits), checked("a", 1.2)
    write_point(front_of(model, limits=limits, points=["a"]), evaluator, model)
    content = yaml.safe_load((tmp_path / "points" / "1" / "pipeline.yaml").read_text())
    *_, float_file, export = content["stages"]
    assert float_file == {"name": "float_onnx", "stage": "export_onnx", "input": "train"}
    measured = {"gate": "max_latency", "batch": 1, "against": "float_onnx"}
    assert export["gates"] == [{**measured, "p50_ms": 1.23456}, {**measured, "p95_ms": 2.0}]
    assert MaxLatency(p50_ms=1.5).rule == "p50 at batch 1 <= 1.5 ms"


def test_a_point_that_was_slow_for_a_moment_is_run_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    evaluator, model = evaluator_of(tmp_path, said, latency="1ms"), checked("a", 0.9)
    front = front_of(model, limits={"latency": "1ms"}, points=["a"])
    slow = LATENCY.verdict(1.3)
    left = refuse_runs(monkeypatch, slow, None, "not reached")
    assert run_point(front, evaluator, model) is None and not said
    assert next(left) == "not reached"
    refuse_runs(monkeypatch, slow, slow)
    refusal = (
        "export_onnx: max_latency; the search measured 0.9 ms; it may pass once this machine has "
        "less to do"
    )
    assert run_point(front, evaluator, model) == Refusal(refusal, may_pass=True)
    assert said == [f"warning: points/1: {refusal}"]
    # What a stage says of itself is no state.
    lasting = "a stage failed; it may pass once this machine has less to do"
    folders, refused = {"a": "points/1", "b": "points/2"}, {"a": refusal, "b": lasting}
    changes = {"refused": refused, "may_pass": ("a",), "folders": folders}
    shown = front.model_copy(update=changes)
    assert [line for line in lines_below(shown, tmp_path) if "compress run" in line] == [
        "run again, once this machine has less to do: compress run "
        f"{tmp_path}/points/1/pipeline.yaml --out {tmp_path}/points/1"
    ]


def test_a_refused_point_keeps_its_folder(tmp_path: Path) -> None:
    """Though another model beats it, as the float one that loses least."""
    evaluator = evaluator_of(tmp_path, [])
    evaluator.conditions, evaluator.decided_on = "", SimpleNamespace(samples=30)
    state = SearchState(evaluator)
    state.checked = {name: checked(name, ms) for name, ms in {"a": 2.0, "b": 1.0, "c": 3.0}.items()}
    assert state.front().points == ("b",)
    state.refused["a"] = Refusal("busy", may_pass=True)
    assert state.front().points == ("b", "a") and state.front("c").points == ("b", "a", "c")


def test_a_refused_point_keeps_its_number_where_a_faster_one_is_chosen_after_it(
    tmp_path: Path,
) -> None:
    evaluator = evaluator_of(tmp_path, [])
    evaluator.conditions, evaluator.decided_on = "", SimpleNamespace(samples=30)
    state = SearchState(evaluator)
    latencies = {"beaten": 3.0, "faster": 2.0, "fastest": 1.0}
    state.checked = {name: checked(name, ms) for name, ms in latencies.items()}
    assert folder_of(state.front("beaten"), "beaten") == "points/2"
    state.refused["beaten"] = Refusal("busy", may_pass=True)
    assert state.front("faster").points == ("fastest", "beaten", "faster")
    state.refused["fastest"] = Refusal("busy", may_pass=True)
    assert folder_of(state.front("faster"), "beaten") == "points/2"


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [(NotMeasurable("not measurable now"), True), (StageFailed("it takes no such batch"), False)],
)
def test_a_latency_that_cannot_be_measured_may_pass_later_if_the_machine_was_busy(
    error: StageFailed, may_pass: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> float:
        raise error

    monkeypatch.setattr(MaxLatency, "measure", measure)
    verdict = LATENCY.evaluate(*[SimpleNamespace()] * 3)  # type: ignore[arg-type]
    assert (verdict.reason, verdict.was_busy) == (str(error), may_pass)
    evaluator, model = evaluator_of(tmp_path, [], latency="1ms"), checked("a", 0.9)
    front = front_of(model, limits={"latency": "1ms"}, points=["a"])
    refuse_runs(monkeypatch, verdict, verdict)
    refusal = run_point(front, evaluator, model)
    assert refusal is not None and refusal.may_pass == may_pass
    assert ("less to do" in refusal.reason) == may_pass


@pytest.mark.parametrize("outcome", [DROP, StageFailed("no such file")])
def test_a_point_that_answers_worse_or_fails_is_run_once(
    outcome: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, model = evaluator_of(tmp_path, [], latency="1ms"), checked("a", 0.9)
    front = front_of(model, limits={}, points=["a"])
    left = refuse_runs(monkeypatch, outcome, "not reached")
    refusal = run_point(front, evaluator, model)
    assert refusal is not None and "less to do" not in refusal.reason
    assert next(left) == "not reached"


def test_a_full_disk_while_a_point_is_run_ends_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, model = evaluator_of(tmp_path, [], latency="1ms"), checked("a", 0.9)
    full = StageFailed("weights: No space left on device; make room")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device", "weights")
    refuse_runs(monkeypatch, full)
    with pytest.raises(StageFailed, match="make room"):
        run_point(front_of(model, limits={}, points=["a"]), evaluator, model)


def test_a_refusal_by_time_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    content = yaml.safe_load(FILE)
    del content["auto"]
    gates = [{"gate": "max_latency", "p50_ms": 1}, {"gate": "max_file_size", "mebibytes": 1e-6}]
    content["stages"] = [{"stage": "export_onnx", "gates": gates}]
    file, out = tmp_path / "net.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(content))
    measured = iter([1.5, 0.75, 0.25])
    monkeypatch.setattr(MaxLatency, "measure", lambda *_: next(measured))
    found = []
    for limit in (1, 1, 1, 0.5):
        gates[0]["p50_ms"] = limit
        file.write_text(yaml.safe_dump(content))
        with pytest.raises(SystemExit) as end:
            cli.app(["run", str(file), "--out", str(out), "--quiet"])
        assert end.value.code == 3
        report = json.loads((out / "report.json").read_text())
        found.append(report["stages"][-1]["verdicts"][0]["value"])
    assert found == [1.5, 0.75, 0.75, 0.25], "what passed is remembered, where it passes still"
