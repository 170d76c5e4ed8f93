"""What `why`, `diff`, `report` and `doctor` tell of runs and of the machine."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.sealed_json import dump_sealed
from compress.pipelines import Pipeline
from compress.pipelines.commands import doctor
from compress.pipelines.commands.cache_miss import why
from compress.pipelines.results.comparison import compare, row_of
from compress.pipelines.results.schema import Report
from compress.pipelines.runner.cache_keys import history_parts
from compress.pipelines.runner.run import preview_state

LOCKED = hashlib.sha256(b'{"version": 1}').hexdigest()
NAMES = ("status", "test", "failed")


def reason(project, stage):
    return why(Pipeline.from_yaml(project.file), project.out, stage)


def changed(found):
    return {p.what: (p.before, p.value) for p in found.parts if p.before != p.value}


def test_every_change_of_a_stage_is_named(project) -> None:
    assert reason(project, "train").does == "cached"
    assert not changed(reason(project, "train"))
    project.edit("epochs: 3, batch_size: 24", "epochs: 4, batch_size: 32")
    found = reason(project, "train")
    assert found.does.startswith("runs (settings.")
    assert changed(found) == {"settings.epochs": (3, 4), "settings.batch_size": (24, 32)}
    line = next(line for line in found.lines() if "settings.epochs" in line)
    assert line.split() == ["settings.epochs", "4", "was", "3"]


def test_a_stage_whose_input_is_not_made_has_no_parts_yet(project) -> None:
    project.edit("epochs: 3", "epochs: 4")
    found = reason(project, "export_onnx")
    assert (found.does, found.parts) == ("runs (after prune_channels)", ())
    with pytest.raises(PipelineInvalid, match="did you mean 'export_onnx'"):
        reason(project, "export_onx")


def test_an_archive_is_packed_anew_where_what_it_says_of_the_checkpoint_changed(project) -> None:
    project.edit("  factory: nets:mlp", "  factory: nets:mlp\n  checkpoint: mlp.safetensors")
    project.file.write_text(project.file.read_text() + "  - {stage: package_torchserve}\n")
    weights = {f"{i}.{name}": torch.ones(1) for i in (0, 2) for name in ("weight", "bias")}
    found = []
    for by in ("one", "another"):
        save_file(weights, project.folder / "mlp.safetensors", {"saved by": by})
        pipeline = Pipeline.from_yaml(project.file)
        state = preview_state(pipeline, project.out)[1]
        found.append(history_parts(state.plan.stages[-1], state)["history"])
    assert found[0].pop("source") != found[1].pop("source")
    assert found[0] == found[1]


@pytest.mark.soak
def test_two_runs_are_compared_by_stage(project, finished_run) -> None:
    assert compare(finished_run.out, finished_run.out).found == ()
    project.edit("epochs: 3", "epochs: 4")
    project.run()
    found = compare(finished_run.out, project.out)
    asked = {d.what: (d.before, d.after) for d in found.asked}
    assert asked.pop("settings.stages.train.epochs") == (3, 4)
    assert not found.surroundings
    differing = {d.what for d in found.found}
    assert {"train.sha256", "export_onnx.sha256", "export_onnx.p50_ms"} <= differing
    assert not {"status", "train.parameters"} & differing


def test_a_stage_of_one_run_alone_is_shown_against_nothing(project, finished_run) -> None:
    project.run(until="train")
    rows = {
        what: (a, b) for what, a, b in map(row_of, compare(finished_run.out, project.out).found)
    }
    before, after = rows["export_onnx.bytes"]
    assert before.endswith("B")
    assert after == "–"


def test_no_name_of_a_stage_and_no_second_gate_hides_a_difference(finished_run, tmp_path) -> None:
    report = Report.read(finished_run.out)
    export = report.stages[-1]
    (verdict,) = export.verdicts
    runs = {}
    for run, passed, status in (("one", True, "passed"), ("two", False, "refused")):
        verdicts = (verdict.model_copy(update={"against": "train", "passed": passed}), verdict)
        stages = [export.model_copy(update={"name": n, "verdicts": verdicts}) for n in NAMES]
        runs[run] = tmp_path / run
        runs[run].mkdir()
        changed = report.model_copy(update={"stages": tuple(stages), "status": status})
        changed.write(runs[run], page="")
    found = {d.what: (d.before, d.after) for d in compare(runs["one"], runs["two"]).found}
    rule = f"{verdict.rule} against train"
    assert found == {
        "status": ("passed", "refused"),
        **{f"{name}.gates.{rule}": ("passed", "refused") for name in NAMES},
    }


def test_a_folder_without_a_report_is_named(finished_run, tmp_path) -> None:
    with pytest.raises(ArtifactInvalid, match="holds no readable report"):
        compare(finished_run.out, tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("report.json", b"[]", "not as it was written"),
        ("report.json", dump_sealed({"lock_sha256": LOCKED, "version": 2}), "version: "),
        ("lock.json", b"{}", "not as the run wrote it"),
        ("lock.json", b"7", "not as the run wrote it"),
    ],
)
def test_a_report_of_somebody_elses_is_one_line(
    finished_run, tmp_path, file, content, reason
) -> None:
    for name in ("report.json", "lock.json"):
        shutil.copy(finished_run.out / name, tmp_path)
    if b"version" in content:
        (tmp_path / "lock.json").write_bytes(b'{"version": 1}')
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ArtifactInvalid, match=f"holds no readable report .*{reason}") as error:
        compare(finished_run.out, tmp_path)
    assert "\n" not in str(error.value)


def test_the_doctor_names_what_is_missing(hide_java: Callable[[], None]) -> None:
    here = doctor.examine()
    assert here.stages["train"] == ()
    assert here.versions["torch"]
    hide_java()
    without = doctor.examine()
    assert without.programs == {"java": None, "g++": None}
    assert any("java" in need for need in without.stages["package_torchserve"])
    assert any("apt-get install chromium" in need for need in without.stages["device web"])
    assert any(line.startswith("✗ package_torchserve: needs java") for line in without.lines())


def test_without_torch_the_doctor_says_so_and_other_commands_name_it(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('none here', name='torch')\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from compress.cli import main; main()", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    said = run("doctor")
    assert said.returncode == 0, said.stderr
    assert "✗ torch: cannot be imported (ModuleNotFoundError: none here); pip" in said.stdout
    assert "✗ train: needs torch\n" in said.stdout and "GiB\n" in said.stdout
    (tmp_path / "net.py").write_text("import torch\n")
    refused = run("init", "net.py")
    assert (refused.returncode, refused.stderr) == (
        4,
        "error: needs torch, which is not installed; compress doctor says what is missing\n",
    )
