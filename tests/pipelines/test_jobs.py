"""`--jobs`: branches made by several processes, which die alone and never outlive the run."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from compress import PruneChannels, Target, Train
from compress.common.errors import StageFailed, cause_lines
from compress.common.requirements import undisturbed
from compress.pipelines import Pipeline
from compress.pipelines.executors.task import TaskResult
from compress.pipelines.results.schema import Report
from compress.pipelines.system.jsonl_log import LOG
from tests.forking import Commands
from tests.pipelines.conftest import BRIEFLY

ROOT = Path(__file__).parents[2]
NETS = """
import os, pathlib, signal, subprocess, sys, time
from torch import nn

HERE = pathlib.Path("FOLDER")

def mlp(hidden=16):
    if "compress.pipelines.executors.process_worker" in sys.modules:
        in_a_worker()
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))

def in_a_worker():
    try:
        (HERE / "die").unlink()  # by one worker only
    except FileNotFoundError:
        pass
    else:
        os.kill(os.getpid(), signal.SIGKILL)
    if (HERE / "hang").exists():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        for pid in (os.getpid(), child.pid):
            (HERE / f"{pid}.pid").touch()
        time.sleep(3600)
"""
FILE = """\
version: 1
model:
  factory: nets:mlp
  inputs: [{name: x, shape: [batch, 4]}]
stages:
  - {name: thin, stage: prune_weights, matrix: {amount: [0.25, 0.5]}}
  - {stage: export_torchscript}
  - {name: same, stage: prune_weights, input: source, amount: 0.5}
  - {name: bare, stage: prune_channels, input: source, ratio: 0.5, exclude: ["*"]}
  - {name: lost, stage: export_torchscript}
  - name: big
    stage: export_torchscript
    input: source
    gates: [{gate: max_size, ratio: 0.01}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS.replace("FOLDER", str(tmp_path)))
    (tmp_path / "fan.yaml").write_text(FILE)
    return tmp_path / "fan.yaml"


def run(file: Path, out: str, **options) -> tuple[list[str], Report]:
    """Return the errors of a run that fails, and its report."""
    with pytest.raises(StageFailed) as caught:
        Pipeline.from_yaml(file).run(file.parent / out, **options)
    return cause_lines(caught.value), Report.read(file.parent / out)


class InThisProcess:
    """An engine of two places that makes what was begun last first, and says what it does."""

    runs_apart = ()

    events: list[tuple[str, str]]

    def __init__(self, places: int, *_) -> None:
        self.places, self.under_way = places, []

    def submit(self, making) -> None:
        self.under_way.append(making)
        self.events.append(("begun", making.name))

    def next(self) -> TaskResult:
        making = self.under_way.pop()
        self.events.append(("made", making.name))
        try:
            return TaskResult(making.name, making(lambda *_: None)[1], None)
        except StageFailed as error:
            return TaskResult(making.name, 0.0, error)

    def close(self) -> None:
        assert not self.under_way


@pytest.mark.slow
def test_nothing_is_evaluated_while_a_stage_runs(file, monkeypatch) -> None:
    events: list[tuple[str, str]] = []
    monkeypatch.setattr(InThisProcess, "events", events, raising=False)
    monkeypatch.setattr("compress.pipelines.executors.engines.ProcessPool", InThisProcess)

    def announce(line: str) -> None:
        name, _, what = line.partition(": ")
        if what.startswith(("ran in", "cached")):
            events.append(("judged", name))

    errors, report = run(file, "side", jobs=2, announce=announce)
    under_way: set[str] = set()
    for what, name in events:
        if what == "begun":
            under_way.add(name)
            assert len(under_way) <= 2
        elif what == "made":
            under_way.remove(name)
        else:
            assert not under_way, events
    one_by_one, expected = run(file, "turn")
    assert [error.replace("/side", "/turn") for error in errors] == one_by_one
    assert shown(report) == shown(expected)
    assert ("begun", "same") not in events, "another branch had made the same artifact"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("a cable was pulled")], ids=repr)
def test_all_stages_running_when_a_run_is_ended_are_reported(file, monkeypatch, error) -> None:
    class Ended(InThisProcess):
        def next(self) -> TaskResult:
            raise error

        def close(self) -> None:
            assert [making.name for making in self.under_way] == under_way

    under_way = ["thin-amount=0.25", "thin-amount=0.5"]
    monkeypatch.setattr(Ended, "events", [], raising=False)
    monkeypatch.setattr("compress.pipelines.executors.engines.ProcessPool", Ended)
    with pytest.raises((KeyboardInterrupt, StageFailed)) as caught:
        Pipeline.from_yaml(file).run(file.parent / "out", jobs=2)
    report = Report.read(file.parent / "out")
    assert [failure.name for failure in report.failures] == under_way
    assert {failure.status for failure in report.failures} == {"interrupted"}
    assert report.failed_stage == report.failures[0]
    if isinstance(error, KeyboardInterrupt):
        assert report.status == "interrupted"
        assert report.error == f"interrupted at {', '.join(under_way)}"
        assert caught.value.__notes__ == [report.error]
    else:
        assert report.status == "failed"
        assert "a cable was pulled" in report.error
    lines = [json.loads(line) for line in (file.parent / "out" / LOG).read_text().splitlines()]
    failed = [line["stage"] for line in lines if line["event"] == "stage_failed"]
    assert failed == under_way


def shown(report: Report) -> dict:
    """Return what two reports of the same run have in common."""
    timed = {"seconds", "judged_seconds", "measurements", "verdicts"}
    stages = [row.model_dump(mode="json", exclude=timed) for row in report.stages]
    return {
        "stages": stages,
        "verdicts": [[v.passed for v in row.verdicts] for row in report.stages],
        "failures": report.failures,
        "skipped": report.skipped,
        "status": report.status,
        "artifacts": report.lock["artifacts"],
    }


@pytest.fixture
def unmarked(file: Path) -> Path:
    """Return a pipeline whose branches all are made."""
    file.write_text(FILE[: FILE.index("  - {name: bare")])
    return file


@pytest.mark.soak
def test_a_killed_process_fails_its_branch_alone_and_the_next_run_is_as_any_other(unmarked) -> None:
    folder = unmarked.parent
    (folder / "die").touch()
    (error,), report = run(unmarked, "side", jobs=2)
    (failure,) = report.failures
    assert error == f"{failure.name}: its process was ended by SIGKILL; perhaps memory ran out"
    thin = {"thin-amount=0.25", "thin-amount=0.5", "same"}
    assert failure.name in thin
    assert thin - {failure.name} < {row.name for row in report.stages}
    again: list[str] = []
    side = Pipeline.from_yaml(unmarked).run(folder / "side", jobs=2, announce=again.append)
    ran = {line.partition(":")[0] for line in again if ": running" in line}
    assert ran <= {failure.name, "export_torchscript" + failure.name.removeprefix("thin")}
    turn = Pipeline.from_yaml(unmarked).run(folder / "turn")
    assert side.lock["artifacts"] == turn.lock["artifacts"]
    assert [row.name for row in side.stages] == [row.name for row in turn.stages]
    for name in turn.lock["artifacts"]:
        paths = [folder / out / "artifacts" / name for out in ("side", "turn")]
        files = [sorted(f.relative_to(p) for f in p.rglob("*") if f.is_file()) for p in paths]
        assert files[0] == files[1]
        assert all((paths[0] / f).read_bytes() == (paths[1] / f).read_bytes() for f in files[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGKILL],
    ids=lambda n: n.name,
)
def test_no_process_outlives_the_run(unmarked, number, commands: Commands) -> None:
    folder = unmarked.parent
    (folder / "hang").touch()
    options = ("--out", folder / "out", "--jobs", "2")
    process = commands.start("run", unmarked, *options, cwd=ROOT, first=BRIEFLY)
    while len(pids := list(folder.glob("*.pid"))) < 4:
        assert _runs(process.pid), process.communicate(timeout=60)
        time.sleep(0.1)
    process.send_signal(number)
    error = process.communicate(timeout=300)[1]
    left = {int(path.stem) for path in pids}
    deadline = time.monotonic() + 300
    while left := {pid for pid in left if _runs(pid)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    if number == signal.SIGINT:
        assert process.returncode == 130
        thin = ["thin-amount=0.25", "thin-amount=0.5"]
        where = f"interrupted at {', '.join(thin)}"
        assert error.splitlines()[-1] == f"{where}; run the same command again to resume"
        report = json.loads((folder / "out" / "report.json").read_text())
        assert (report["status"], report["error"]) == ("interrupted", where)
        assert [failure["name"] for failure in report["failures"]] == thin


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_measures_time_or_waits_for_other_nodes_is_made_alone() -> None:
    nodes = {"nodes": 2}
    assert not undisturbed(PruneChannels(ratio=0.5))
    assert not undisturbed(PruneChannels(target=Target(macs=0.5)))
    assert undisturbed(PruneChannels(target=Target(latency=0.5)))
    assert undisturbed(PruneChannels(ratio=0.5, finetune={"epochs": 1, "parallel": nodes}))
    assert not undisturbed(Train(epochs=1))


def test_threads_are_divided_unless_each_process_has_its_own_number(monkeypatch) -> None:
    from compress.pipelines.executors.engines import threads_each

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_each(2) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)), raising=False)
    monkeypatch.setattr("compress.common.process.cpu_quota", lambda: None)
    assert [threads_each(jobs) for jobs in (2, 4, 20)] == [4, 2, 1]
