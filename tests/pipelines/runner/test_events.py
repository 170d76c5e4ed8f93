"""What is recorded of a run beside its report: the log, and a tracker's figures."""

import importlib.util
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from compress.common.errors import GateRefused, PipelineInvalid, StageFailed, Unavailable
from compress.pipelines import Pipeline
from compress.pipelines.config.pipeline import Tracker
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.runner.trackers import TrackerHandler, flatten
from compress.pipelines.system import jsonl_log
from compress.pipelines.system.jsonl_log import LOG, LogFile, log_event, log_handler
from compress.training.loop.metrics import mlflow_name

ALWAYS = {"time", "level", "run", "event", "stage", "message"}
TRACKER = "tracker: {kind: %s}\nstages:"


def logged(out: Path) -> list[dict[str, Any]]:
    """Return the log's lines, each valid JSON with what every line has."""
    found = [json.loads(line) for line in (out / LOG).read_text().splitlines()]
    assert all(line.keys() >= ALWAYS for line in found)
    return found


def last_run(out: Path) -> list[dict[str, Any]]:
    """Return the lines of the last run."""
    lines = logged(out)
    return [line for line in lines if line["run"] == lines[-1]["run"]]


def of(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == event]


def test_a_run_is_logged_from_its_start_to_its_end(finished_run) -> None:
    lines = logged(finished_run.out)
    began, ended = lines[0], lines[-1]
    assert len({line["run"] for line in lines}) == 1
    assert (began["event"], ended["event"]) == ("run_started", "run_finished")
    assert began["pipeline"] == "small" and "torch" in began["versions"]
    assert began["settings"]["stages"][0] == {"stage": "train", "epochs": 3, "batch_size": 24}
    assert (ended["status"], ended["stage"]) == ("passed", None)
    assert set(ended["test"]) == {"train", "export_onnx"}
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert all(line["time"].endswith("Z") for line in lines)

    stages = ["train", "prune_channels", "export_onnx"]
    started = of(lines, "stage_started")
    assert [line["stage"] for line in started] == ["source", *stages]
    assert started[1]["reason"] == "not run before"
    finished = of(lines, "stage_finished")
    assert [line["stage"] for line in finished] == ["source", *stages]
    assert finished[0]["kind"] == "eager" and finished[0]["measurements"] is None
    assert finished[1]["measurements"]["metric"]["name"] == "accuracy"
    epochs = of(lines, "epoch")
    assert [(line["stage"], line["epoch"]) for line in epochs[:3]] == [
        ("train", n) for n in (1, 2, 3)
    ]
    assert {"loss", "val/accuracy", "learning_rate"} <= epochs[0]["figures"].keys()
    (gate, _) = of(lines, "gate_judged")
    assert (gate["stage"], gate["gate"], gate["passed"]) == ("prune_channels", "max_drop", True)


def test_each_run_of_a_folder_has_an_id_and_the_log_decides_nothing(project) -> None:
    before = (project.out / LOG).read_text()
    with (project.out / LOG).open("a") as log:
        log.write('{"time": "2026-01-01T00:00:00Z", "event": "half a li')  # as a crash leaves it
    project.run()
    assert project.ran() == {}
    assert (project.out / LOG).read_text().startswith(before)
    lines = logged(project.out)
    assert len({line["run"] for line in lines}) == 2
    cached = of(last_run(project.out), "stage_cached")
    stages = ["source", "train", "prune_channels", "export_onnx"]
    assert [line["stage"] for line in cached] == stages
    assert of(last_run(project.out), "stage_started") == []


def test_refusals_and_failures_are_logged_with_their_stage(project) -> None:
    project.edit("points: 50", "points: -100")
    with pytest.raises(GateRefused):
        project.run()
    lines = last_run(project.out)
    (gate,), ended = of(lines, "gate_judged"), lines[-1]
    assert (gate["stage"], gate["gate"], gate["passed"]) == ("prune_channels", "max_drop", False)
    assert gate["level"] == ended["level"] == "error"
    assert (ended["event"], ended["status"]) == ("run_finished", "refused")
    assert "max_drop" in ended["error"]
    assert [line["stage"] for line in of(lines, "stage_skipped")] == ["export_onnx"]

    project.edit("epochs: 3,", "epochs: 3, learning_rate: 1.0e+30,")
    with pytest.raises(StageFailed):
        project.run()
    lines = last_run(project.out)
    (failed,), ended = of(lines, "stage_failed"), lines[-1]
    assert (failed["stage"], failed["level"]) == ("train", "error")
    assert failed["error"] == ended["error"]
    assert ended["status"] == "failed"


def test_a_log_that_cannot_be_written_stops_nothing(project, caplog) -> None:
    (project.out / LOG).unlink()
    (project.out / LOG).mkdir()
    assert project.run().status == "passed"
    assert caplog.text.count("log.jsonl cannot be written; the run goes on without it") == 1


def test_a_log_grows_no_further_than_twice_its_bound(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(jsonl_log, "MAX_LOG_BYTES", 2000)
    for _ in range(3):
        with log_handler(LogFile(tmp_path / LOG, "run", lambda: "")):
            for number in range(20):
                log_event("message", f"{number} \udcff", not_a_number=float("nan"), path=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {LOG, f"{LOG}.1"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4000
    last = logged(tmp_path)[-1]
    assert last["message"] == "19 ?"
    assert (last["not_a_number"], last["path"]) == (None, str(tmp_path))


def test_others_hear_no_more_than_before(tmp_path, caplog) -> None:
    logger = logging.getLogger(jsonl_log.LOGGER)
    before = (logger.level, logger.propagate, [*logger.handlers])
    log = logging.getLogger("compress.somewhere")
    with log_handler(LogFile(tmp_path / LOG, "run", lambda: "here")):
        log.info("for the log alone")
        log.warning("for all")
    log.info("for nobody")
    assert [record.getMessage() for record in caplog.records] == ["for all"]
    assert [line["message"] for line in logged(tmp_path)] == ["for the log alone", "for all"]
    assert before == (logger.level, logger.propagate, logger.handlers)


def test_announced_lines_are_logged_too(finished_run) -> None:
    stages = ("stage_started", "stage_finished", "stage_cached", "stage_failed", "stage_skipped")
    announced = ("task_known", *stages)
    messages = [line["message"] for line in logged(finished_run.out) if line["event"] in announced]
    assert messages == finished_run.said


def test_the_model_that_came_in_is_measured_where_all_is_compared_with_it(project) -> None:
    project.file.write_text(re.sub(r"  - \{stage: train.*\n", "", project.file.read_text()))
    project.run()
    source, *_ = of(last_run(project.out), "stage_cached")
    assert (source["stage"], source["measurements"]["bytes_ratio"]) == ("source", 1.0)
    assert source["judged_seconds"] > 0


def scalars(folder: Path) -> tuple[dict[str, list[tuple[int, float]]], dict[str, str]]:
    """Return the scalars and texts of an event file."""
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    tags = found.Tags()
    values = {name: [(e.step, e.value) for e in found.Scalars(name)] for name in tags["scalars"]}
    texts = {name: found.Tensors(name)[0].tensor_proto.string_val[0] for name in tags["tensors"]}
    return values, {name: text.decode() for name, text in texts.items()}


def test_tensorboard_shows_settings_curves_figures_and_the_report(project) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    lines = project.file.read_text()
    project.file.write_text(lines.replace("stages:", TRACKER % "tensorboard"))
    assert project.run().status == "passed"
    assert project.ran() == {}  # a tracker is no part of any key
    report = project.run(start="train", until="train")
    folders = sorted((project.out / "tracking").iterdir(), key=lambda f: f.stat().st_mtime_ns)
    runs = list(dict.fromkeys(line["run"] for line in logged(project.out)))[1:]
    assert {folder.name for folder in folders} == {f"small-{run}" for run in runs}

    whole, _ = scalars(project.out / "tracking" / f"small-{runs[0]}")
    assert {"train/accuracy", "export_onnx/bytes", "export_onnx/speedup", "train/test"} <= set(
        whole
    )
    assert "train/loss" not in whole  # nothing was trained

    again, texts = scalars(project.out / "tracking" / f"small-{runs[1]}")
    assert [step for step, _ in again["train/loss"]] == [1, 2, 3]
    value = report.stages[0].measurements.metric.value
    assert again["train/accuracy"] == [(0, pytest.approx(value))]
    assert "| stages.train.epochs | 3 |" in texts["settings/text_summary"]
    assert texts["status/text_summary"] == "passed"
    page = project.out / "tracking" / f"small-{runs[1]}" / "report.html"
    assert page.read_text() == (project.out / "report.html").read_text()


def test_a_tracker_takes_events_alone(tmp_path, caplog) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    tracker = Tracker(kind="tensorboard", uri="boards")
    with log_handler(TrackerHandler(tracker, tmp_path, "small-run", "run")):
        logging.getLogger("compress.somewhere").info(
            "words", extra={"log_fields": {"stage": "train"}}
        )
        log_event("epoch", "words", stage="a", task="train 1/2", epoch=3, figures={"loss": 0.5})
        log_event("run_finished", "words", status="failed", test={})
    assert scalars(tmp_path / "boards" / "small-run")[0] == {"train 1/2/loss": [(3, 0.5)]}
    assert caplog.text == ""


def test_a_branch_has_a_name_that_mlflow_takes() -> None:
    assert mlflow_name("thin-amount=0.25/val:x y") == "thin-amount:0.25/val:x y"
    validation = pytest.importorskip("mlflow.utils.validation", reason="needs mlflow")
    with pytest.raises(Exception, match="may only contain"):
        validation._validate_metric_name("thin-amount=0.25/bytes")
    validation._validate_metric_name(mlflow_name("thin-amount=0.25/bytes"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_mlflow_shows_settings_curves_figures_and_the_report(project) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow")
    from mlflow import MlflowClient

    lines = project.file.read_text()
    project.file.write_text(lines.replace("stages:", TRACKER % "mlflow"))
    project.run(start="train", until="train")
    project.edit("points: 50", "points: -100")
    with pytest.raises(GateRefused):
        project.run()
    folder = project.out / "tracking"
    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("compress").experiment_id
    refused, passed = client.search_runs([experiment], order_by=["start_time DESC"])
    assert (refused.info.status, passed.info.status) == ("FAILED", "FINISHED")
    assert passed.data.params["stages.train.epochs"] == "3"
    assert passed.data.params["model.factory"] == "nets:mlp"
    history = client.get_metric_history(passed.info.run_id, "train/loss")
    assert [point.step for point in history] == [1, 2, 3]
    assert {"train/accuracy", "train/bytes", "train/p95_ms"} <= passed.data.metrics.keys()
    assert [file.path for file in client.list_artifacts(passed.info.run_id)] == ["report.html"]
    assert list((folder / "artifacts").rglob("report.html"))
    assert not (Path.cwd() / "mlruns").exists()


def test_a_tracker_that_fails_is_logged_once_and_the_run_passes(project, caplog) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    (project.out / "tracking").touch()
    project.file.write_text(project.file.read_text().replace("stages:", TRACKER % "tensorboard"))
    assert project.run().status == "passed"
    assert caplog.text.count("tracker tensorboard failed (NotADirectoryError") == 1
    warned = [line for line in last_run(project.out) if line["level"] == "warning"]
    assert len(warned) == 1


@pytest.mark.parametrize("kind", ["tensorboard", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused_first(project, monkeypatch, kind) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == kind else find(n))
    project.file.write_text(project.file.read_text().replace("stages:", TRACKER % kind))
    wanted = rf"small.yaml:6: tracker: needs {kind}, .*pip install -e '\.\[{kind}\]'"
    with pytest.raises(Unavailable, match=wanted) as caught:
        build_plan(Pipeline.from_yaml(project.file))
    assert caught.value.exit_code == 4
    assert "\n" not in str(caught.value)


def test_the_page_names_every_event_and_its_fields(finished_run, project) -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    (snippet,) = re.findall(r"```yaml\n(tracker: .*?)```", page, re.DOTALL)
    Tracker.model_validate(yaml.safe_load(snippet)["tracker"])
    table = page.partition("| event |")[2].partition("\n\n")[0]
    project.run()
    fields_of = {line["event"]: line.keys() - ALWAYS for line in logged(project.out)}
    assert len(fields_of) == 9
    for event, fields in fields_of.items():
        (row,) = (row for row in table.splitlines() if f"`{event}`" in row.partition(" | ")[0])
        assert {f"`{field}`" for field in fields} <= set(re.findall("`[a-z_]+`", row)), event


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{kind: tensorboard, uri: 'http://host/'}", "tensorboard writes to a folder"),
        ("{kind: mlflow, uri: 'https://me:secret@host/'}", "MLFLOW_TRACKING_USERNAME"),
        ("{kind: wandb}", "expected 'tensorboard', 'mlflow', found 'wandb'"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused(project, settings, message) -> None:
    tracker = f"tracker: {settings}\nstages:"
    project.file.write_text(project.file.read_text().replace("stages:", tracker))
    with pytest.raises(PipelineInvalid, match=message) as caught:
        Pipeline.from_yaml(project.file)
    assert "small.yaml:6: tracker" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_settings_have_dotted_names() -> None:
    stages = [{"stage": "train", "gates": [{"gate": "parity"}]}, {"name": "b", "stage": "train"}]
    content = {"seed": 3, "model": {"inputs": [{"shape": ["batch", 4]}], "arguments": {}}}
    found = dict(flatten({**content, "stages": stages}))
    assert found["model.inputs.0.shape"] == "['batch', 4]"
    assert found["stages.train.gates.0.gate"] == "parity"
    assert (found["stages.b.stage"], found["seed"]) == ("train", "3")


def test_the_docs_list_every_event() -> None:
    root = Path(__file__).parents[3]
    sources = [file.read_text() for file in (root / "pipelines").rglob("*.py")]
    emitted = {
        name for text in sources for name in re.findall(r'\b(?:emit|log_event)\(\s*"(\w+)"', text)
    }
    page = (root / "docs" / "cli.md").read_text()
    listed = {*re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `\w+`[^|]*", page, re.MULTILINE)))}
    assert len(emitted) > 15
    assert emitted - listed == set()
