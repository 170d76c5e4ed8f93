"""`compress run` on one node and `compress join` on another: here, two agents on one machine."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest
from safetensors.torch import load_file

from compress.common.errors import PipelineInvalid, StageFailed
from pipelines import Pipeline
from pipelines.executors.join import BEAT, RUN, RunStatus, advertise_run, join_run
from tests.pipelines.conftest import measured_briefly

ROOT = Path(__file__).parents[3]

NETS = """
import os, signal, time
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

def mlp():
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))

class Behaving(Dataset):
    def __init__(self, x, y):
        self.x, self.y, self.read = x, y, 0
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        how = os.environ.get("BEHAVIOUR") if "RANK" in os.environ else None
        if how == "raise":
            raise ValueError("this disk cannot be read")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "die once":
            self.read += 1
            if self.read > 100 and not os.path.exists("died"):
                open("died", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        if how == "slow":
            time.sleep(0.05)
        return self.x[index], self.y[index]

def data():
    x = torch.randn(240, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return {"train": Behaving(x[:180], y[:180]), "val": TensorDataset(x[180:], y[180:])}
"""
FILE = """\
version: 1
model:
  factory: nets:mlp
  inputs: [{name: x, shape: [batch, 4]}]
data: {factory: "nets:data"}
stages:
  - {stage: train, epochs: %(epochs)d, batch_size: 16, keep: last, parallel: &how %(parallel)s}
  - stage: prune_channels
    ratio: 0.5
    finetune: {epochs: 1, batch_size: 16, parallel: *how}
"""
TWO_NODES = "{nodes: 2, rendezvous: $MEETING_POINT, rendezvous_seconds: 200, restarts: 1}"


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return project(tmp_path)


def project(folder: Path) -> Path:
    (folder / "nets.py").write_text(NETS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (folder / "meeting_point").write_text(f"127.0.0.1:{free.getsockname()[1]}")
    return folder


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project that two processes of one node have run."""
    user = project(tmp_path_factory.mktemp("one"))
    with measured_briefly():
        Pipeline.from_yaml(user / pipeline(user, "{processes: 2}")).run(user / "out")
    return user


def compress(user: Path, *arguments: str, behaviour: str = "") -> subprocess.Popen[str]:
    environment = {
        "PYTHONPATH": str(ROOT),
        "MEETING_POINT": (user / "meeting_point").read_text(),
        "BEHAVIOUR": behaviour,
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-c", "import cli; cli.main()", *arguments],
        cwd=user,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def pipeline(user: Path, parallel: str = TWO_NODES, epochs: int = 2) -> str:
    (user / "p.yaml").write_text(FILE % {"parallel": parallel, "epochs": epochs})
    return "p.yaml"


def ended(process: subprocess.Popen[str]) -> str:
    """Return what a process said, once it and all that it started are gone."""
    _, said = process.communicate(timeout=250)
    for _ in range(600):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return said
        time.sleep(0.1)
    raise AssertionError("a process is left")


def train_twice(
    user: Path, *options: str, behaviour: str = "", parallel: str = TWO_NODES
) -> list[str]:
    """Return what the runner and the joiner say at their ends, after their exit codes."""
    runner = compress(user, "run", pipeline(user, parallel), "--out", "two", *options)
    joiner = compress(user, "join", "two", behaviour=behaviour)
    return [f"{p.returncode} {said}" for p, said in ((p, ended(p)) for p in (runner, joiner))]


def weights(user: Path, out: str, stage: str) -> dict:
    return load_file(user / out / "artifacts" / stage / "weights.safetensors")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_nodes_reach_the_weights_of_two_processes(user, two_processes):
    said = train_twice(user)
    assert [line[0] for line in said] == ["0", "0"], said
    assert said[1].count("joining a training of 2 nodes with 1 processes each") == 2
    for stage in ("train", "prune_channels"):
        two, one = weights(user, "two", stage), weights(two_processes, "out", stage)
        # Which node has rank 0 is chance, and with two addends their order decides nothing.
        assert all((two[name] == one[name]).all() for name in one)
    assert not list((user / "two" / ".store").rglob("*.pickle"))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_rank_of_another_node_is_told_by_the_runner(user):
    words = r"error: train: rank [01] was ended by SIGKILL; perhaps memory .* \(on node "
    once = TWO_NODES.replace("restarts: 1", "restarts: 0")
    runner, joiner = train_twice(user, behaviour="die", parallel=once)
    assert runner[0] == joiner[0] == "1"
    assert re.search(words, runner), runner
    assert "error: the run in two failed: train: rank " in joiner


@pytest.mark.slow
@pytest.mark.multiprocess
def test_after_a_rank_of_another_node_was_killed_all_nodes_begin_again(user, two_processes):
    said = train_twice(user, "--until", "train", behaviour="die once")
    assert [line[0] for line in said] == ["0", "0"], said
    assert (user / "died").exists()
    assert "was ended by SIGKILL" in said[0] and "all are started again" in said[0]
    assert said[1].count("joining a training of 2 nodes with 1 processes each") == 2
    two, one = weights(user, "two", "train"), weights(two_processes, "out", "train")
    assert all((two[name] == one[name]).all() for name in one)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_runner_ends_the_joiner_too(user):
    file = pipeline(user, epochs=50)
    runner = compress(user, "run", file, "--out", "two", behaviour="slow")
    joiner = compress(user, "join", "two", "--silence", "5", behaviour="slow")
    for line in runner.stderr:
        if "epoch 1/50" in line:
            runner.kill()
            break
    assert "the run in two has given no sign of life for 5 s" in ended(joiner)
    assert joiner.returncode == 1
    ended(runner)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_joiner_that_is_stopped_is_named(user):
    file = pipeline(user, epochs=50)
    runner = compress(user, "run", file, "--out", "two", behaviour="slow")
    joiner = compress(user, "join", "two", behaviour="slow")
    for line in runner.stderr:
        if "epoch 1/50" in line:
            joiner.send_signal(signal.SIGTERM)
            break
    ended(joiner)
    assert joiner.returncode == 143
    assert f"the node was told to stop (on node {socket.gethostname()})" in ended(runner)
    assert runner.returncode == 1


def end_of(out: Path, **more) -> str:
    with pytest.raises(StageFailed) as error:
        join_run(out, print, **{"wait": 0, **more})
    return str(error.value)


def test_a_run_that_never_begins_is_waited_for_until_the_deadline(tmp_path):
    assert f"no run began in {tmp_path} within 0 s; start `compress run`" in end_of(tmp_path)


def test_it_is_said_at_once_what_is_waited_for_and_until_when(tmp_path, monkeypatch):
    class Slept(Exception):
        pass

    def sleep(seconds):
        raise Slept

    said, before = [], datetime.now()
    monkeypatch.setattr("pipelines.executors.join.time.sleep", sleep)
    for folder in (tmp_path, tmp_path / "later"):
        with pytest.raises(Slept):
            join_run(folder, said.append, wait=600)
    words = r"waiting until (.*) for a run in (.*) to show signs of life; `compress run` with --out"
    found = [re.match(words, line).groups() for line in said]
    assert [folder for _, folder in found] == [str(tmp_path), str(tmp_path / "later")]
    for until, _ in found:
        seconds = (datetime.fromisoformat(until) - before).total_seconds()
        assert seconds >= 599
    with pytest.raises(Slept):
        join_run(tmp_path, said.append, wait=float("inf"))


def test_it_is_said_once(tmp_path):
    said = []
    with pytest.raises(StageFailed):
        join_run(tmp_path, said.append, wait=1)
    assert len(said) == 1


def test_where_no_run_can_begin_none_is_waited_for(tmp_path):
    with pytest.raises(PipelineInvalid, match=r"there is no folder .*absent; .*mkdir -p ") as error:
        join_run(tmp_path / "absent" / "out", print, wait=600)
    assert error.value.exit_code == 2
    (tmp_path / "file").touch()
    with pytest.raises(PipelineInvalid, match="is a file"):
        join_run(tmp_path / "file", print, wait=600)


def test_what_an_older_run_left_is_no_run(tmp_path, monkeypatch):
    (tmp_path / ".store").mkdir()
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for state in ("running", "done", "failed"):
        run = RunStatus(name="another", job=None, state=state)
        (tmp_path / ".store" / RUN).write_text(run.model_dump_json())
        (tmp_path / ".store" / BEAT).write_text("another 7\n")
        assert "no run began" in end_of(tmp_path, wait=1)


@pytest.mark.parametrize("state", ["running", "done", "failed"])
def test_a_run_that_begins_is_not_taken_for_the_one_before_it(tmp_path, monkeypatch, state):
    """Its first sign of life may be seen before what it tells of itself."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    store, seen = tmp_path / ".store", []
    store.mkdir()
    older, newer = (RunStatus(name=name, job=None) for name in ("older", "newer"))

    def told(run: RunStatus, state: str) -> None:
        (store / RUN).write_text(run.model_copy(update={"state": state}).model_dump_json())

    told(older, state)
    happens = iter([
        lambda: (store / BEAT).write_text("newer 0\n"),
        lambda: told(newer, "running"),
        lambda: told(newer, "done"),
    ])  # fmt: skip
    monkeypatch.setattr("pipelines.executors.join.time.sleep", lambda seconds: next(happens)())
    monkeypatch.setattr(
        "pipelines.executors.join._join_next", lambda store, run, *_: seen.append(run)
    )
    join_run(tmp_path, print, wait=60)
    assert [run.name for run in seen] == ["newer"]


def test_a_run_of_the_same_slurm_step_may_have_ended_before(tmp_path, monkeypatch):
    store = tmp_path / ".store"
    store.mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with advertise_run(store):
        assert json.loads((store / RUN).read_text())["state"] == "running"
    join_run(tmp_path, print, wait=0)
    with pytest.raises(ValueError, match="no"), advertise_run(store):
        raise ValueError("no memory")
    assert f"the run in {tmp_path} failed: no memory" in end_of(tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "no run began" in end_of(tmp_path)


def test_a_run_that_falls_silent_is_taken_for_dead(tmp_path, monkeypatch):
    store = tmp_path / ".store"
    store.mkdir()
    (store / RUN).write_text(RunStatus(name="one", job=None).model_dump_json())
    (store / BEAT).write_text("one\n")

    def beat_once(seconds):
        if (store / BEAT).read_text() == "one\n":
            (store / BEAT).write_text("two\n")

    monkeypatch.setattr("pipelines.executors.join.time.sleep", beat_once)
    assert "no sign of life for 0 s and is taken for dead" in end_of(tmp_path, wait=60, silence=0.5)
