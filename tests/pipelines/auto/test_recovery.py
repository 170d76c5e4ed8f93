"""`compress auto` with training: successive halving, a search that is killed, and its points."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.attack.forgeries import edit_a_figure
from compress import cli
from compress.common.sealed_json import write_state
from compress.pipelines.auto.candidates import Candidate, CheckedModel
from compress.pipelines.auto.front import Front, write_point
from compress.pipelines.auto.search import Recovery, models_to_begin
from compress.pipelines.auto.search_state import Solution
from compress.pipelines.config.auto_settings import AutoLimits
from compress.pipelines.config.pipeline import PipelineConfig
from tests.pipelines.auto.test_auto import FILE, NETS, auto
from tests.pipelines.conftest import BRIEFLY, DEADLINE, measured_briefly

ROOT = Path(__file__).parents[3]
COMMAND = f"{BRIEFLY}\nfrom compress import cli\ncli.main()"


def with_recovery(folder: Path) -> Path:
    recovery = "recovery: {epochs: 3, batch_size: 20, learning_rate: 0.05, teaching: {}}"
    space = f"space: {{widths: {{values: 2}}, formats: [float], {recovery}}}"
    content = FILE.replace("space: {widths: {values: 2}, formats: [float, int8_static]}", space)
    (folder / "nets.py").write_text(NETS)
    (folder / "net.yaml").write_text(content)
    return folder / "net.yaml"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a search that has come to its end, beside its pipeline file."""
    file = with_recovery(tmp_path_factory.mktemp("searched"))
    with measured_briefly():
        assert auto(file, "--out", file.parent / "out", "--quiet", "--latency", "1s") == 0
    return file.parent / "out"


def trained_models(out: Path) -> dict[str, dict[str, Any]]:
    models = json.loads((out / "front.json").read_text())["checked"]
    return {model["name"]: model for model in models if model["trained"]}


def epochs(out: Path) -> Iterator[tuple[str, str, int]]:
    """Yield the candidate, the stage and the number of each epoch that was trained after cuts."""
    for log in sorted(out.glob("candidates/*/log.jsonl")):
        for event in map(json.loads, log.read_text().splitlines()):
            if event["event"] == "epoch" and str(event["stage"]).startswith("recovery"):
                yield log.parent.name, event["stage"], event["epoch"]


@pytest.mark.slow
def test_the_better_half_of_trained_models_is_trained_on(searched: Path) -> None:
    models = json.loads((searched / "front.json").read_text())["checked"]
    after = {
        epochs: {str(m["widths"]) for m in models if m["trained"] == epochs} for epochs in (1, 3)
    }
    assert after[1] and after[3] < after[1] and len(after[3]) <= (len(after[1]) + 1) // 2
    # A longer training begins with the shorter one, which is not done again.
    (trained, *_) = (m["name"] for m in models if m["trained"] == 3)
    report = json.loads((searched / "candidates" / trained / "report.json").read_text())
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert [*stages] == ["train", "prune_channels", "recovery-1", "recovery-3", "export_onnx"]
    assert stages["recovery-1"]["cached"] and not stages["recovery-3"]["cached"]


@pytest.mark.soak
@pytest.mark.slow
def test_a_search_killed_while_it_trains_goes_on_to_the_same_models(
    searched: Path, tmp_path: Path
) -> None:
    file, out = with_recovery(tmp_path), tmp_path / "out"
    arguments = ["auto", str(file), "--out", str(out), "--quiet", "--latency", "1s"]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 3 * DEADLINE

    def begun() -> int:
        """Return how many trainings of smaller models have begun."""
        lines = (out / "log.jsonl").read_text().splitlines() if (out / "log.jsonl").exists() else []
        events = (json.loads(line) for line in lines if line.endswith("}"))
        return sum(e["event"] == "candidate_chosen" and e["trained"] > 0 for e in events)

    try:
        while begun() < 2 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    before, trained = trained_models(out), [*epochs(out)]
    assert before, "it was killed after the first model was trained"
    assert len(before) < len(trained_models(searched)), "and before the last one"
    assert auto(*arguments[1:]) == 0
    found, whole = trained_models(out), trained_models(searched)
    assert {name: found[name] | {"confirmed_drop": None} for name in before} == {
        name: model | {"confirmed_drop": None} for name, model in before.items()
    }
    assert found.keys() == whole.keys()
    for name, model in whole.items():
        assert [found[name][key] for key in ("loss", "drop", "bytes")] == [
            model[key] for key in ("loss", "drop", "bytes")
        ]
    # What was trained is not trained again.
    again = [*epochs(out)]
    assert [epoch for epoch in again if epoch[0] in before] == [
        epoch for epoch in trained if epoch[0] in before
    ]
    assert len(again) == len({*again})


@pytest.mark.slow
def test_the_pipeline_of_a_trained_model_makes_the_same_file(
    searched: Path, tmp_path: Path
) -> None:
    front, base = Front.read(searched), PipelineConfig.from_yaml(searched.parent / "net.yaml")
    assert front is not None
    model = next(model for model in front.checked if model.trained == 3)
    evaluator: Any = SimpleNamespace(
        base=base, settings=base.auto, out=searched.parent / "one", tables=None, batch=1
    )
    write_point(front.model_copy(update={"points": (model.name,)}), evaluator, model)
    point, again = evaluator.out / "points" / "1" / "pipeline.yaml", tmp_path / "again"
    with pytest.raises(SystemExit) as end:
        cli.app(["run", str(point), "--out", str(again), "--quiet"])
    assert not end.value.code
    made = searched / "candidates" / model.name / "artifacts"
    for file in ("recovery-3/manifest.json", "export_onnx/model.onnx"):
        assert (again / "artifacts" / file).read_bytes() == (made / file).read_bytes()


@pytest.mark.soak
def test_a_training_ends_where_the_model_is_good(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.pipelines.auto.search.UNTRAINED_SHARE", 0.0)
    file, out = with_recovery(tmp_path), tmp_path / "out"
    assert auto(file, "--out", out, "--json") == 0
    models = json.loads(capfd.readouterr().out)["checked"]
    trained = [model for model in models if model["trained"]]
    good = {str(model["widths"]) for model in trained if model["drop"] <= 5}
    longer = [model for model in trained if model["trained"] > 1]
    assert good and all(
        any(m["widths"] == one["widths"] and m["trained"] == 1 and m["drop"] > 5 for m in trained)
        for one in longer
    )


@pytest.mark.parametrize(
    ("affordable", "count"),
    # One epoch for each of 6, 3 more for 3, 9 more for 2 of them: 6 + 9 + 18.
    [(math.inf, 6), (33, 6), (32.9, 5), (32, 5), (31.9, 4), (19, 4), (18.9, 3), (1, 1), (0, 1)],
)
def test_a_halving_begins_with_the_models_that_can_be_trained_to_its_end(
    affordable: float, count: int
) -> None:
    assert models_to_begin(6, affordable, [1, 4, 13]) == count


def candidate(width: int) -> Candidate:
    return Candidate("float", widths=(("group", width),))


def checked_model(one: Candidate, loss: float, latency_ms: float = 0.1) -> CheckedModel:
    return CheckedModel(
        name=one.name,
        format=one.format,
        widths=dict(one.widths),
        trained=one.trained,
        predicted_ms=None,
        latency_ms=latency_ms,
        bytes=10,
        loss=loss,
        drop=40.0,
    )


@pytest.fixture
def recovery(tmp_path: Path) -> Recovery:
    """Return what trains models of a search that has checked the smallest and a too slow one.

    The smallest loses less than the predictions add up to.
    """
    smallest = checked_model(candidate(1), loss=0.9)
    slow = checked_model(candidate(5), loss=0.1, latency_ms=3.0)
    losses = [(5, 1.0), (4, 2.0), (3, 3.0), (2, 4.0), (1, 5.0)]
    solutions = [Solution(candidate(n), 1.0, loss) for n, loss in losses]

    def solve(programmes: object, latency_ms: float, known: list[Candidate]) -> Solution | None:
        assert latency_ms == 1.98  # room for models that are slower than predicted
        return next((one for one in solutions if one.candidate not in known), None)

    limits = AutoLimits.model_validate({"max_drop": 1.0, "latency": "2ms"})
    search: Any = SimpleNamespace(
        settings=SimpleNamespace(limits=limits),
        checked={model.name: model for model in (smallest, slow)},
        failed={},
        models={},
        asked_ms=2.0,
        loss_decides=True,
        offered=lambda: [*search.checked.values()],
        solve=solve,
    )
    return Recovery(search, {}, [1], tmp_path / "halvings.json", "key")


def test_edited_halvings_are_not_gone_on_with(recovery: Recovery, caplog) -> None:
    write_state(recovery.file, recovery.key, [recovery._contenders()])
    begun = replace(recovery).begun
    assert [one for one, _ in begun[0]] == [candidate(4), candidate(3), candidate(2), candidate(1)]
    assert edit_a_figure(recovery.file)
    assert replace(recovery).begun == []
    assert "halvings.json: is not as it was written" in caplog.text


def test_those_that_lose_least_are_trained_first(recovery: Recovery) -> None:
    found = [candidate for candidate, _ in recovery._contenders()]
    assert found == [candidate(4), candidate(3), candidate(2), candidate(1)]


def test_no_training_begins_that_cannot_end_in_time(
    recovery: Recovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    search: Any = recovery.state

    def check(one: Candidate, predicted_ms: float) -> None:
        clock.now += 60
        search.checked[one.name] = checked_model(one, loss=0.5)

    search.check = check
    monkeypatch.setattr(
        "compress.pipelines.auto.search.time",
        SimpleNamespace(monotonic=lambda: clock.now),
    )
    recovery.train(deadline=100)
    assert [m.widths for m in search.checked.values() if m.trained] == [{"group": 4}]
