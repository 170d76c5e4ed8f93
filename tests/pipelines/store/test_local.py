"""What happens to a store: two runs at once, other formats, no rights, a clock that goes back."""

import ctypes
import errno
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from compress.artifacts.artifact import Artifact
from compress.common import atomic_files
from compress.common.atomic_files import remove, remove_leftovers, write_atomically
from compress.common.errors import ArtifactInvalid, CompressError, PipelineInvalid
from compress.pipelines import Pipeline
from compress.pipelines.reporting.html import rerender_report
from compress.pipelines.results import schema as report_module
from compress.pipelines.results.schema import Report
from compress.pipelines.runner.run import preview_run
from compress.pipelines.store.entry import FORMAT, FORMAT_FILE
from compress.pipelines.store.local import WORK, Store
from compress.pipelines.system.temp_files import temporary_files

fork = multiprocessing.get_context("fork")


def _run(project, barrier, answers) -> None:
    torch.set_num_threads(1)  # a forked process has none of its parent's threads, and would wait
    barrier.wait()
    try:
        report = project.run()
        answers.put((report.status, [s.cached for s in report.stages], project.said))
    except CompressError as error:
        answers.put((error.exit_code, str(error), project.said))


def _together(*projects) -> list[tuple]:
    """Run projects in processes that start at the same moment, and return what each said."""
    barrier, answers = fork.Barrier(len(projects)), fork.Queue()
    children = [fork.Process(target=_run, args=(p, barrier, answers)) for p in projects]
    for child in children:
        child.start()
    results = [answers.get(timeout=150) for _ in children]
    for child in children:
        child.join(60)
    return results


@pytest.mark.soak
def test_two_runs_started_together_both_end_well(project, finished_run) -> None:
    shutil.rmtree(project.out)
    first, second = _together(project, project)
    assert first[:2] == ("passed", [False] * 3)
    assert second[:2] == ("passed", [True] * 3)
    assert any("waiting for another run" in line and "Ctrl-C" in line for line in second[2])
    for _ in range(3):
        assert [results[0] for results in _together(project, project, project)] == ["passed"] * 3
    before, after = (Report.read(p.out) for p in (finished_run, project))
    assert after.lock["artifacts"] == before.lock["artifacts"]
    for path in (project.out / "artifacts").iterdir():
        Artifact.from_directory(path).verify()


@pytest.mark.slow
def test_two_pipelines_in_one_out_leave_the_results_of_the_last(project) -> None:
    other = type(project)(project.folder)
    other.file = project.folder / "other.yaml"
    other.file.write_text(project.file.read_text().replace("ratio: 0.4", "ratio: 0.5"))
    results = _together(project, other)
    assert [status for status, *_ in results] == ["passed", "passed"]
    digests = {
        p.name: Artifact.from_directory(p).digest for p in (project.out / "artifacts").iterdir()
    }
    assert Report.read(project.out).lock["artifacts"] == digests


def test_a_run_whose_store_is_removed_while_it_waits_makes_a_new_one(project) -> None:
    root, said = project.out / ".store", []

    def remove_it(line: str) -> None:
        said.append(line)
        holding.__exit__(None, None, None)
        shutil.rmtree(root)

    holding = Store(root).locked()
    holding.__enter__()
    with Store(root, announce=remove_it).locked():
        assert (root / FORMAT_FILE).exists()
    assert len(said) == 1


@pytest.mark.parametrize("found", ['{"format": 0}', '{"format": 99}', "{", "[]"])
def test_a_store_of_another_format_is_refused_with_what_to_do(project, found) -> None:
    (project.out / ".store" / FORMAT_FILE).write_text(found)
    expected = r"\.store: is of format .* reads format 1; choose another --out, or remove .*\.store"
    with pytest.raises(PipelineInvalid, match=expected) as error:
        project.run()
    assert error.value.exit_code == 2
    with pytest.raises(PipelineInvalid, match=expected):
        preview_run(Pipeline.from_yaml(project.file), project.out)


def test_a_store_without_a_format_file_is_used(project) -> None:
    (project.out / ".store" / FORMAT_FILE).unlink()
    project.run()
    assert project.ran() == {}
    assert json.loads((project.out / ".store" / FORMAT_FILE).read_text()) == {"format": FORMAT}


def _give_up_privileges() -> None:
    """Let permissions count for this process, root's too."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, nothing) == 0


class _Unprivileged:
    def __init__(self, project) -> None:
        self.project, self.said = project, project.said

    def run(self) -> Report:
        _give_up_privileges()
        return self.project.run()


@pytest.mark.parametrize("closed", ["", ".store", "artifacts"])
def test_a_folder_that_cannot_be_written_is_one_line_and_a_wrong_argument(project, closed) -> None:
    folder = project.out / closed
    folder.chmod(0o555)
    ((code, message, _),) = _together(_Unprivileged(project))
    folder.chmod(0o755)
    assert code == 2
    assert "cannot be written (Permission denied)" in message and "--out" in message
    assert "\n" not in message and str(project.out) in message
    project.run()
    assert project.ran() == {}


def test_a_clock_that_goes_back_changes_nothing(project, finished_run, monkeypatch) -> None:
    hour = itertools.count(0, -3600.0)
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + next(hour))
    for path in project.out.rglob("*"):
        os.utime(path, (4e9, 4e9))
    project.run()
    assert project.ran() == {}
    project.run(force=True, until="prune_channels")
    before, after = (Report.read(p.out).lock["artifacts"] for p in (finished_run, project))
    assert after == {name: before[name] for name in ("source", "train", "prune_channels")}


def test_an_edit_is_seen_whatever_the_clock_says(project) -> None:
    nets = project.folder / "nets.py"
    before = nets.stat()
    nets.write_text(nets.read_text().replace("hidden=32", "hidden=48"))
    os.utime(nets, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert nets.stat().st_size == before.st_size
    project.run(until="train")
    assert set(project.ran()) == {"source", "train"}


def test_what_a_killed_run_left_is_swept_up(project) -> None:
    store = project.out / ".store"
    entry = next(store.glob("*/record.json")).parent
    left = [
        project.out / ".report.html.partial-1",
        project.out / "artifacts" / ".train.removed-1" / "weights",
        store / ".last.json.partial-1",
        entry / ".artifact.partial-1" / "weights",
        store / WORK / "train" / "fit-1" / "checkpoint",
    ]
    for file in left:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("half")
    (store / WORK / "train" / "done").write_text(entry.name)
    interrupted = store / WORK / "prune_channels" / "fit-2"
    interrupted.mkdir(parents=True)
    another = project.out / ".onnx.partial-1"  # a stage's that someone's own program runs
    another.mkdir()
    project.run()
    assert another.exists()
    assert not [file for file in left if file.exists()]
    assert not (project.out / "artifacts" / ".train.removed-1").exists()
    assert not (store / WORK / "train").exists()
    assert interrupted.exists(), "a stage that was interrupted goes on"


def test_removing_leaves_the_whole_or_none(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    kept = tmp_path / ".mine.partial-copy"
    kept.write_text("a user's")
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if it were killed there
    remove(folder)
    assert not folder.exists()
    monkeypatch.undo()
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [kept]
    link, elsewhere = tmp_path / "link", tmp_path / "elsewhere"
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    remove(link)
    (tmp_path / ".link.removed-1").symlink_to(elsewhere)
    remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == {kept, elsewhere}
    write_atomically(tmp_path / "file", "whole")
    remove_leftovers(tmp_path)
    assert (tmp_path / "file").read_text() == "whole"


def _die_while_replacing(new: Path, old: Path) -> None:
    atomic_files.remove = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    atomic_files.replace(new, old)


def test_what_replaces_another_is_there_at_every_moment(tmp_path, monkeypatch) -> None:
    new, old = tmp_path / ".artifact.partial-1", tmp_path / "artifact"
    for folder in (new, old):
        folder.mkdir()
        (folder / "weights").write_text(folder.name)
    child = fork.Process(target=_die_while_replacing, args=(new, old))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert (old / "weights").read_text() == new.name
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [old]
    for exchange in (atomic_files._exchange, _cannot_exchange):
        monkeypatch.setattr(atomic_files, "_exchange", exchange)
        new.mkdir()
        atomic_files.replace(new, old)
        assert not list(old.iterdir()) and list(tmp_path.iterdir()) == [old]
        remove(old)
        new.mkdir()
        atomic_files.replace(new, old)
        assert list(tmp_path.iterdir()) == [old]


def _cannot_exchange(new: Path, folder: Path) -> None:
    raise OSError(errno.EINVAL, "no such operation here")


def test_a_file_written_while_a_run_begins_and_sweeps_up_is_written(tmp_path, monkeypatch) -> None:
    swept = []

    def sweep_once(path: Path) -> None:
        if not swept:
            swept.append(path)
            remove_leftovers(tmp_path, "*.json")

    monkeypatch.setattr(atomic_files, "sync", sweep_once)
    write_atomically(tmp_path / "sensitivity.json", "{}")
    assert swept and [f.name for f in tmp_path.iterdir()] == ["sensitivity.json"]


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_report_of_the_one_before(project, commands) -> None:
    project.edit("ratio: 0.4", "ratio: 0.5")
    killed = (
        "import os; from compress.pipelines.runner import executor\n"
        "executor.evaluator.ArtifactEvaluator.evaluate = lambda *_: os._exit(0)\n"
    )
    arguments = ("run", project.file, "--out", project.out)
    done = commands.call(*arguments, cwd=project.folder, first=killed)
    assert done.returncode == 0
    assert not (project.out / "report.json").exists()
    with pytest.raises(ArtifactInvalid, match="the last run ended before it could write a report"):
        rerender_report(project.out, print)
    at_work = pytest.raises(ArtifactInvalid, match="a run is at work")
    with Store(project.out / ".store").locked(), at_work:
        rerender_report(project.out, print)
    assert project.run().status == "passed"
    assert rerender_report(project.out, print).status == "passed"


def test_a_report_that_cannot_be_written_is_shown(project, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(report_module, "write_atomically", refuse)
    said: list[str] = []
    assert rerender_report(project.out, said.append) == Report.read(project.out)
    assert said == [f"{project.out}: the page is not written anew (Read-only file system)"]


def test_a_page_is_written_anew_only_where_no_run_is_at_work(project) -> None:
    page, said = project.out / "report.html", []
    page.write_text("old")
    with Store(project.out / ".store", announce=said.append).locked():
        report = rerender_report(project.out, said.append)
    assert page.read_text() == "old" and "a run is at work" in said.pop()
    assert rerender_report(project.out, said.append) == report
    assert page.read_text() != "old" and not said


def _die_with_temporary_files(place, answers) -> None:
    import tempfile

    tempfile.tempdir = str(place)
    with temporary_files():
        answers.put(tempfile.mkdtemp())
        answers.close()
        answers.join_thread()
        os.kill(os.getpid(), signal.SIGKILL)


def test_temporary_files_of_a_killed_run_go_with_the_next(tmp_path, monkeypatch) -> None:
    import tempfile

    answers = fork.Queue()
    child = fork.Process(target=_die_with_temporary_files, args=(tmp_path, answers))
    child.start()
    left = answers.get(timeout=60)
    child.join(60)
    assert left.startswith(str(tmp_path)) and Path(left).is_dir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_files():
        own = tempfile.gettempdir()
        assert os.environ["TMPDIR"] == own
        assert [str(path) for path in tmp_path.iterdir()] == [own]
        with temporary_files():  # one of a run beside it
            assert Path(own).is_dir()
    assert list(tmp_path.iterdir()) == []
    assert os.environ.get("TMPDIR") != own and tempfile.gettempdir() == str(tmp_path)


def test_what_multiprocessing_keeps_in_the_folder_is_not_missed_later(fresh_process) -> None:
    said = fresh_process("""
import multiprocessing.util, sys, tempfile
from compress.pipelines.system.temp_files import temporary_files

with temporary_files():
    assert multiprocessing.util.get_temp_dir().startswith(tempfile.gettempdir())
tempfile.mkstemp(dir=multiprocessing.util.get_temp_dir())
sys.stderr = sys.stdout
""")
    assert said == ""


def test_queues_and_processes_of_a_librarys_caller_live_on_after_a_run(fresh_process) -> None:
    said = fresh_process("""
import multiprocessing, os, sys
from multiprocessing.resource_sharer import DupFd
from compress.pipelines.system.temp_files import temporary_files

def begin_a_process():
    child = multiprocessing.get_context("forkserver").Process(target=print, args=("lives",))
    child.start()
    child.join()

if __name__ == "__main__":
    sys.stderr = sys.stdout
    for _ in range(2):
        with temporary_files():
            DupFd(1)
            begin_a_process()
    os.close(DupFd(1).detach())
    begin_a_process()
""")
    assert said.split() == ["lives"] * 3
