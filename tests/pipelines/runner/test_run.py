import json
import multiprocessing
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from compress.artifacts.artifact import Artifact
from compress.common.errors import GateRefused, PipelineInvalid, StageFailed
from compress.pipelines import Pipeline
from compress.pipelines.results.schema import Report
from compress.pipelines.runner.run import preview_run


def _digests(out: Path) -> dict[str, str]:
    return {p.name: Artifact.from_directory(p).digest for p in (out / "artifacts").iterdir()}


def test_a_run_leaves_report_lock_and_sealed_artifacts(finished_run) -> None:
    report = Report.read(finished_run.out)
    assert report.status == "passed"
    assert [s.name for s in report.stages] == ["train", "prune_channels", "export_onnx"]
    assert report.baseline_name == "train"
    train, pruned, onnx = (s.measurements for s in report.stages)
    assert pruned.parameters < train.parameters
    assert pruned.macs < train.macs
    assert train.metric.split == "val"
    assert onnx.bytes == (finished_run.out / "artifacts/export_onnx/model.onnx").stat().st_size
    assert all(v.passed for s in report.stages for v in s.verdicts)
    assert set(report.test.values) == {"train", "export_onnx"}
    lock = json.loads((finished_run.out / "lock.json").read_text())
    assert lock["artifacts"] == _digests(finished_run.out)
    assert "torch" in lock["versions"]
    for path in (finished_run.out / "artifacts").iterdir():
        Artifact.from_directory(path).verify()


def test_a_second_run_computes_nothing_and_changes_nothing(project) -> None:
    before, report = _digests(project.out), Report.read(project.out)
    second = project.run()
    assert project.ran() == {}
    assert all(s.cached for s in second.stages)
    assert _digests(project.out) == before
    assert [s.measurements for s in second.stages] == [s.measurements for s in report.stages]


def test_stages_before_the_last_are_left_unmeasured_where_that_is_asked_for(project) -> None:
    before = Report.read(project.out)
    project.edit("ratio: 0.4", "ratio: 0.5")
    train, pruned, onnx = (s.measurements for s in project.run(measured="last").stages)
    assert train.metric is pruned.metric is pruned.speedup is pruned.peak_mebibytes is None
    assert pruned.latency_ms.reason == pruned.peak_reason == "not asked for"
    assert pruned.parameters < train.parameters == before.stages[0].measurements.parameters
    assert onnx.metric is not None and onnx.latency_ms.p50 and onnx.peak_mebibytes
    report = project.run(measured="none")
    assert report.stages[-1].measurements.bytes == onnx.bytes
    assert report.stages[-1].measurements.latency_ms.reason == "not asked for"
    assert report.baseline.metric is None and report.baseline.bytes
    # A later run measures what these left out.
    assert all(s.measurements.metric is not None for s in project.run().stages)


def test_equal_runs_give_byte_identical_artifacts(finished_run, project) -> None:
    project.run(force=True)
    assert set(project.ran()) == {"source", "train", "prune_channels", "export_onnx"}
    assert _digests(project.out) == _digests(finished_run.out)


def test_a_changed_setting_is_named_and_reruns_only_what_follows(project) -> None:
    project.edit("ratio: 0.4", "ratio: 0.5")
    project.run()
    ran = project.ran()
    assert ran["prune_channels"] == "settings.ratio 0.4 → 0.5"
    assert set(ran) <= {"prune_channels", "export_onnx"}


def test_changed_data_is_named(project) -> None:
    project.edit("shift: 0.0", "shift: 0.5")
    project.run(until="train")
    assert project.ran()["train"] == "data.arguments.shift 0.0 → 0.5"
    assert "source" not in project.ran()


def test_workers_make_nothing_run_again(project) -> None:
    project.edit("{shift: 0.0}}", "{shift: 0.0}, loader: {workers: 1}}")
    project.run()
    assert project.ran() == {}


def test_changed_model_code_is_named(project) -> None:
    nets = project.folder / "nets.py"
    nets.write_text(nets.read_text().replace("hidden=32", "hidden=48"))
    project.run(until="train")
    assert project.ran()["source"].startswith("code ")
    assert "train" in project.ran()


def test_a_damaged_artifact_is_made_again(project) -> None:
    before = Report.read(project.out).stages[-1].artifact.digest
    # The other one is the uncompressed model, with which the speed is compared.
    victims = [*(project.out / ".store").glob("*/artifact/model.onnx")]
    assert len(victims) == 2
    for victim in victims:
        victim.chmod(0o644)
        victim.write_bytes(victim.read_bytes()[:-1] + b"x")
    report = project.run()
    assert project.ran() == {"export_onnx": "its artifact or record is damaged"}
    assert report.stages[-1].artifact.digest == before


def test_a_refused_gate_fails_the_run_and_keeps_the_artifact(project) -> None:
    project.edit("{gate: parity, atol: 1e-4}", "{gate: max_size, ratio: 0.001}")
    seen: list[Report] = []
    with pytest.raises(GateRefused, match=r"max_size.*; why: compress explain ") as error:
        project.run(finished=seen.append)
    report = Report.read(project.out)
    assert seen[0].status == report.status == "refused"
    assert report.error == str(error.value)
    assert report.test is None, "a refused run must not touch the test split"
    Artifact.from_directory(project.out / "artifacts/export_onnx").verify()
    assert project.ran() == {}, "a changed limit judges again without computing"

    project.edit("ratio: 0.001", "ratio: 4")
    assert project.run().status == "passed"
    assert project.ran() == {}


def test_a_refusal_stops_the_stages_after_it(project) -> None:
    project.edit("points: 50", "points: -101")
    with pytest.raises(GateRefused, match="prune_channels"):
        project.run()
    assert [s.name for s in Report.read(project.out).stages] == ["train", "prune_channels"]


def test_a_changed_metric_trains_again_for_it_decides_which_epoch_is_kept(project) -> None:
    project.edit("version: 1", "version: 1\nmetric: loss")
    project.run(until="train")
    assert project.ran()["train"].startswith("metric ")


@pytest.mark.slow
def test_a_speedup_is_judged_against_a_runtime_of_the_float_model(project) -> None:
    gate = "{gate: min_speedup, ratio: 1e-6, against: eager}"
    project.edit("{gate: parity, atol: 1e-4}", gate)
    first, second = (project.run().stages[-1].verdicts for _ in range(2))
    assert first[0].against == "eager"
    assert first == second  # measured once


def test_another_machine_measures_again(project, monkeypatch) -> None:

    before = Report.read(project.out).stages[0].measurements.latency_ms
    other = {"platform": "x", "processor": "another", "cores": 64}
    monkeypatch.setattr("compress.pipelines.runner.run_state.machine", lambda: other)
    report = project.run()
    assert project.ran() == {}
    assert report.stages[0].measurements.latency_ms != before


def test_whatever_the_users_metric_raises_fails_the_run_and_the_report_says_so(project) -> None:
    # Not before it has been tried on samples of `val` and `test`.
    code = "calls = []\ndef score(outputs, targets):\n    calls.append(1)\n"
    code += "    return 1 / (len(calls) < 3)\n"
    (project.folder / "mine.py").write_text(code)
    project.edit("version: 1", "version: 1\nmetric: {name: 'mine:score', higher_is_better: true}")
    with pytest.raises(StageFailed, match=r"train: .*metric 'mine:score' .*ZeroDivisionError"):
        project.run()
    assert Report.read(project.out).status == "failed"


def test_what_is_published_is_this_runs(project) -> None:
    precious = project.out / "artifacts" / "mine.txt"
    precious.write_text("kept")
    project.edit("points: 50", "points: -101")
    with pytest.raises(GateRefused):
        project.run()
    published = {p.name for p in (project.out / "artifacts").iterdir()}
    assert published == {"source", "train", "prune_channels", "mine.txt"}


def test_a_users_folder_in_the_place_of_an_artifact_is_left_alone(project) -> None:
    shutil.rmtree(project.out)
    precious = project.out / "artifacts" / "train" / "precious.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    with pytest.raises(PipelineInvalid, match="would be lost"):
        project.run()
    assert precious.read_text() == "years of work"


def test_an_early_stop_leaves_the_test_split_alone(project) -> None:
    assert project.run(until="prune_channels").test is None


@pytest.mark.slow
def test_until_from_and_force(project) -> None:
    assert [s.name for s in project.run(until="prune_channels").stages] == [
        "train",
        "prune_channels",
    ]
    project.run(start="prune_channels")
    assert project.ran() == {
        "prune_channels": "asked to run again",
        "export_onnx": "asked to run again",
    }
    with pytest.raises(PipelineInvalid, match=r"--until 'trian'.*did you mean 'train'"):
        project.run(until="trian")
    with pytest.raises(PipelineInvalid, match="nothing would run again"):
        project.run(start="export_onnx", until="train")


def test_foreseeing_runs_nothing(project) -> None:
    pipeline = Pipeline.from_yaml(project.file)
    assert set(preview_run(pipeline, project.out).values()) == {"cached"}
    project.edit("epochs: 3", "epochs: 4")
    foreseen = preview_run(Pipeline.from_yaml(project.file), project.out)
    assert foreseen == {
        "source": "cached",
        "train": "runs (settings.epochs 3 → 4)",
        "prune_channels": "runs (after train)",
        "export_onnx": "runs (after prune_channels)",
    }
    elsewhere = project.folder / "elsewhere"
    preview_run(pipeline, elsewhere)
    assert not elsewhere.exists()


def test_a_failed_stage_is_reported_and_never_cached(project) -> None:
    project.edit("epochs: 3, batch_size: 24", "epochs: 3, batch_size: 24, learning_rate: 1e30")
    for _ in range(2):
        with pytest.raises(StageFailed, match="train: "):
            project.run()
        assert "train" in project.ran()
        assert Report.read(project.out).status == "failed"
    entries = [path for path in (project.out / ".store").iterdir() if len(path.name) == 32]
    assert all((entry / "record.json").is_file() for entry in entries)


def test_an_unwritable_out_is_said_at_once(project) -> None:
    (project.folder / "file").write_text("")
    project.out = project.folder / "file" / "out"
    with pytest.raises(PipelineInvalid, match=r"cannot be written.*--out"):
        project.run()


def _run_with_small_files(project, answers) -> None:
    torch.set_num_threads(1)  # a forked process has none of its parent's threads, and would wait
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))
    try:
        project.run()
    except StageFailed as error:
        answers.put(str(error))


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(project) -> None:
    shutil.rmtree(project.out)
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_run_with_small_files, args=(project, answers))
    child.start()
    message = answers.get(timeout=150)
    child.join(60)
    assert message.startswith("source: ")
    assert "\n" not in message
    assert not list(project.out.rglob("manifest.json"))
    assert not list(project.out.rglob("*partial*"))
    project.run(until="train")


def test_a_second_run_waits_for_the_first(project) -> None:
    import fcntl
    import threading

    lock = os.open(project.out / ".store" / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    release = threading.Timer(0.5, lambda: os.close(lock))
    release.start()
    assert project.run().status == "passed"
    assert any("waiting for another run" in line for line in project.said)


def test_outputs_survive_where_hard_links_do_not(project, monkeypatch) -> None:
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    shutil.rmtree(project.out / "artifacts")
    project.run()
    Artifact.from_directory(project.out / "artifacts/export_onnx").verify()


@pytest.mark.slow
def test_a_training_goes_on_where_another_strategy_left_it(project, monkeypatch) -> None:
    from compress.training.loop import trainer

    whole, epochs = trainer._train_epoch, []

    def interrupted(*given):
        epochs.append(given)
        if len(epochs) == 3:
            raise KeyboardInterrupt
        return whole(*given)

    shutil.rmtree(project.out)
    monkeypatch.setattr(trainer, "_train_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        project.run()
    project.edit("batch_size: 24", "batch_size: 24, parallel: {strategy: dp}")
    project.run()
    assert len(epochs) == 3 + 1  # the third again, and none before it
    manifest = json.loads((project.out / "artifacts" / "train" / "manifest.json").read_text())
    assert manifest["facts"]["resumed_across"] == ["1 processes, ddp", "1 processes, dp"]
    assert not list((project.out / ".store" / "work").iterdir())


@pytest.mark.slow
def test_a_model_whose_batch_is_fixed_is_measured_with_that_batch(project) -> None:
    project.edit("shape: [batch, 4]", "shape: [4, 4]")
    report = project.run()
    assert report.status == "passed"
    measured = report.stages[-1].measurements
    assert measured.latency_ms.batch == 4
    assert not measured.peak_reason
