"""One run in several processes that torchrun or srun has started: here, "nodes" on one machine."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file
from torch.distributed import TCPStore

from compress.common.errors import PipelineInvalid, StageFailed
from compress.pipelines.api import Pipeline
from compress.pipelines.executors.launched import check_processes
from compress.training.config.parallel import Parallel
from compress.training.launch import rank_group
from compress.training.launch.rank_group import RankGroup, launched_environment, need_group
from tests.forking import Command, Commands
from tests.pipelines.conftest import BRIEFLY, measured_briefly

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
        self.x, self.y, self.reads = x, y, 0
    def __len__(self):
        return len(self.x)
    def __getitem__(self, index):
        how = os.environ.get("BEHAVIOUR") if "RANK" in os.environ else None
        if how == "raise":
            raise ValueError("this disk cannot be read")
        if how == "die once":
            self.reads += 1
            if self.reads > 100 and not os.path.exists("died"):
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
FORKING = f"""{BRIEFLY}
from functools import partial
from torch.multiprocessing.spawn import start_processes
from compress.training.launch import local_ranks
local_ranks.start_processes = partial(start_processes, start_method="fork")
"""
"""What a command runs first: its ranks need not import torch once more."""
TWO_NODES = "{nodes: 2, restarts: 1}"


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture
def user(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory, forking_ranks) -> Path:
    """Return the results of two processes that one command has started."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "nets.py").write_text(NETS)
    with measured_briefly(), forking_ranks():
        file = folder / pipeline(folder, "{processes: 2}")
        Pipeline.from_yaml(file).run(folder / "out", until="train")
    return folder / "out"


def pipeline(user: Path, parallel: str = TWO_NODES, epochs: int = 2) -> str:
    (user / "p.yaml").write_text(FILE % {"parallel": parallel, "epochs": epochs})
    return "p.yaml"


def start(
    user: Path, command: list[str], behaviour: str = "", **environment: str
) -> subprocess.Popen[str]:
    own = {"PYTHONPATH": str(ROOT), "BEHAVIOUR": behaviour, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=user,
        env={**os.environ, **own, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


RUN = ["compress.cli", "run", "p.yaml", "--out", "out"]


def torchrun(
    user: Path,
    nodes: int,
    processes: int,
    *options: str,
    behaviour: str = "",
    program: tuple[str, ...] = ("-m", "compress.cli"),
) -> list[subprocess.Popen[str]]:
    port = free_port()
    shape = f"--nnodes {nodes} --nproc-per-node {processes}"
    meeting = f"--rdzv-backend c10d --rdzv-id {port} --rdzv-endpoint 127.0.0.1:{port}"
    command = [
        "torch.distributed.run",
        *shape.split(),
        *meeting.split(),
        *program,
        *RUN[1:],
        *options,
    ]
    return [start(user, command, behaviour) for _ in range(nodes)]


def step(rank: int, port: str) -> dict[str, str]:
    """Return the variables that Slurm sets for a task on one of two nodes."""
    numbers = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"}
    numbers |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    return numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


@pytest.fixture
def srun(user: Path, commands: Commands) -> Callable[..., list[Command]]:
    """Return what starts a task on each of two nodes."""

    def start(
        *behaviours: str, files: tuple[str, str] = ("p.yaml",) * 2, until: str = "train"
    ) -> list[Command]:
        port = free_port()
        return [
            commands.start(
                *("run", files[rank], "--out", "out", "--until", until),
                cwd=user,
                first=FORKING,
                environment=step(rank, port) | {"BEHAVIOUR": behaviour},
            )
            for rank, behaviour in enumerate(behaviours or ("", ""))
        ]

    return start


def end_of(process: subprocess.Popen[str] | Command) -> str:
    """Return a process's exit code and output, once it and all that it started are gone."""
    _, output = process.communicate(timeout=250)
    for _ in range(600):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return f"{process.returncode} {output}"
        time.sleep(0.1)
    raise AssertionError("a process is left")


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return the processes that work in a folder, once those have ended that were ending."""
    deadline = time.monotonic() + 120
    while found := [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(folder)]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return found


def until_an_epoch(process: subprocess.Popen[str] | Command) -> None:
    for line in process.stderr:
        if "epoch 1/" in line:
            return
    raise AssertionError("it ended before an epoch")


def same_weights(out: Path, expected: Path, *stages: str, atol: float = 0.0) -> bool:
    def weights(folder: Path, stage: str) -> dict:
        return load_file(folder / "artifacts" / stage / "weights.safetensors")

    return all(
        (tensor - weights(out, stage)[name]).abs().max() <= atol
        for stage in stages
        for name, tensor in weights(expected, stage).items()
    )


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.xdist_group("commands")  # where `two_processes` is
@pytest.mark.parametrize(
    ("nodes", "processes", "parallel", "stages"),
    [
        (1, 2, "{processes: 2}", ["train"]),
        # In the soak: two nodes go the same way, which the tests with srun's variables take too.
        pytest.param(2, 1, TWO_NODES, ["train", "prune_channels"], marks=pytest.mark.soak),
    ],
)
def test_torchrun_reaches_the_weights_of_two_processes_of_one_command(
    user, two_processes, nodes, processes, parallel, stages, commands
) -> None:
    pipeline(user, parallel)
    if "prune_channels" in stages:
        Pipeline.from_yaml(two_processes.with_name("p.yaml")).run(two_processes)
    commands.write_program(user / "compress", first=FORKING)
    program = ("--no-python", str(user / "compress"))
    agents = torchrun(user, nodes, processes, "--until", stages[-1], program=program)
    ends = [end_of(agent) for agent in agents]
    assert [end[0] for end in ends] == ["0"] * nodes, ends
    assert sum(end.count("train: running") for end in ends) == 1, "rank 0 alone reports"
    assert same_weights(user / "out", two_processes, *stages)
    assert not list((user / "out" / ".store").rglob("*.pickle"))


@pytest.mark.soak  # of a lost rank CI has that after which all begin again
@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_node_that_is_killed_ends_the_run_with_one_line_of_rank_0(user) -> None:
    pipeline(user, epochs=50)
    agents = torchrun(user, 2, 1, behaviour="slow")
    log, deadline = user / "out" / "log.jsonl", time.monotonic() + 120
    while not log.exists() or "epoch 1/50" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # Which agent has rank 0 is chance.
    nodes = [psutil.Process(agent.pid).children(recursive=True) for agent in agents]
    second = next(i for i, node in enumerate(nodes) if node[0].environ()["RANK"] == "1")
    # A node whose power fails stops as a whole: killed one after the other, a rank may still report
    # that its parent has ended.
    whole_node = (psutil.Process(agents[second].pid), *nodes[second])
    for process in whole_node:
        process.suspend()
    for process in whole_node:
        process.kill()
    first, killed = agents[1 - second], agents[second]
    output = end_of(first)
    assert output[0] == "1"
    end_of(killed)
    # Either agent may serve the store through which the ranks meet; one that finds it gone may send
    # SIGTERM to rank 0 before that has noticed.
    lost = r"error: train: ((rank 0 lost the|the) connection to |rank 1 has sent no heartbeat)"
    said = f"{lost}|interrupted at train"
    assert re.search(said, output), output
    assert processes_in(user) == []


def until_logged(user: Path, expected: str, count: int = 1) -> None:
    """Wait until the run has logged something some number of times."""
    log, deadline = user / "out" / "log.jsonl", time.monotonic() + 200
    while not log.exists() or log.read_text().count(expected) < count:
        assert time.monotonic() < deadline, expected
        time.sleep(0.1)


@pytest.mark.soak  # test_launch_elastic.py has the rules
@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_training_goes_on_without_a_node_and_with_it_again(user, tmp_path_factory) -> None:
    pipeline(user, "{nodes: 2, min_nodes: 1}", epochs=8)
    port = free_port()
    quickly = "--rdzv-conf keep_alive_interval=2,last_call_timeout=3,is_host={}"
    meeting = f"--rdzv-backend c10d --rdzv-id elastic --rdzv-endpoint 127.0.0.1:{port}"

    def agent(is_host: int) -> subprocess.Popen[str]:
        options = f"--nnodes 1:2 --nproc-per-node 1 --max-restarts 9 {meeting} "
        options += quickly.format(is_host)
        command = ["torch.distributed.run", *options.split(), "-m", *RUN, "--until", "train"]
        # torchrun's own stores would else hold keys of earlier rounds (pytorch issue 135712).
        return start(user, command, "slow", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    agents = [agent(1), agent(0)]
    until_logged(user, "epoch 1/8")
    agents[1].kill()  # its processes end with it
    until_logged(user, "trains on 1 of 1 started machines")
    until_logged(user, "epoch 2/8")
    third = agent(0)
    ends = [end_of(agents[0]), end_of(third)]
    assert [end[0] for end in ends] == ["0", "0"], ends
    end_of(agents[1])
    assert processes_in(user) == []
    assert "resumed with 2 processes, ddp from a checkpoint of 1 processes" in ends[0] + ends[1]
    alone = tmp_path_factory.mktemp("alone")
    (alone / "nets.py").write_text(NETS)
    with measured_briefly():
        file = alone / pipeline(alone, "{processes: 1}", epochs=8)
        Pipeline.from_yaml(file).run(alone / "out", until="train")
    assert same_weights(user / "out", alone / "out", "train", atol=1e-5)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_after_a_rank_of_another_node_was_killed_all_begin_again(user, srun, two_processes) -> None:
    pipeline(user)
    ends = [end_of(task) for task in srun("", "die once")]
    assert [end[0] for end in ends] == ["0", "0"], ends
    assert (user / "died").exists()
    assert "was ended by SIGKILL" in ends[0] and "all are started again" in ends[0]
    assert sum(end.count("train: running") for end in ends) == 1, "rank 0 alone reports"
    assert same_weights(user / "out", two_processes, "train")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_error_on_another_node_is_reported_by_rank_0_alone(user, srun) -> None:
    pipeline(user)
    first, second = map(end_of, srun("", "raise"))
    assert first[0] == second[0] == "1"
    assert "error: train: rank 1: ValueError: this disk cannot be read" in first
    assert second.strip() == "1"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_process_that_is_stopped_ends_the_others(user, srun, stopped) -> None:
    pipeline(user, epochs=50)
    tasks = srun("slow", "slow")
    until_an_epoch(tasks[0])
    tasks[stopped].send_signal(signal.SIGTERM if stopped else signal.SIGINT)
    first, second = map(end_of, tasks)
    if stopped:
        assert second.startswith("143 ")
        assert first.startswith("1 ") and "error: train: rank 1 was stopped" in first
    else:
        assert first.startswith("130 ") and "interrupted at train; run the same" in first
        assert second.strip() == "130"
    assert processes_in(user) == []


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.multiprocess
def test_without_rank_0_the_others_end(user) -> None:
    pipeline(user, epochs=50)
    # Not forks: of the lost connection torch says nothing only where it is imported by a rank.
    port, command = free_port(), [*RUN, "--until", "train"]
    tasks = [start(user, command, "slow", **step(rank, port)) for rank in range(2)]
    until_an_epoch(tasks[0])
    tasks[0].kill()
    assert "1 error: rank 0 has ended; its own output says why" in end_of(tasks[1])
    end_of(tasks[0])
    assert processes_in(user) == []


@pytest.mark.multiprocess
def test_another_pipeline_file_on_a_node_is_refused(user, srun) -> None:
    (user / "old.yaml").write_text("version: 1")
    tasks = srun(files=(pipeline(user), "old.yaml"))
    first, second = map(end_of, tasks)
    assert "error: rank 1 has another old.yaml; start the same command" in first
    assert first.startswith("2 ") and second.strip() == "2"
    assert not (user / "out").exists()


@pytest.fixture
def group(monkeypatch) -> RankGroup:
    """Pretend that this is rank 0 of two machines with two processes each."""
    numbers = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    group = RankGroup({**numbers, "MASTER_ADDR": "here", "MASTER_PORT": "1"}, store=None)
    monkeypatch.setattr(rank_group, "_joined", [group])
    return group


def test_rank_0_requests_and_the_others_answer_until_it_leaves() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    one_each = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    one_each |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    first, second = (
        RankGroup({"RANK": str(rank), **one_each}, store)
        for rank, store in enumerate((server, client))
    )
    with pytest.raises(StageFailed, match="rank 1 of 2 has not answered for 0 s"):
        first.request("compare", seconds=0.3)
    exit_codes: list[int] = []
    problems = {"compare": "", "enter": "cannot take part: no disk"}
    serves = threading.Thread(
        target=lambda: exit_codes.append(second.serve(lambda request: problems[request["command"]]))
    )
    serves.start()
    first.request("compare")
    with pytest.raises(PipelineInvalid, match=r"^rank 1 cannot take part: no disk$"):
        first.request("enter")
    first.leave(3)
    serves.join(60)
    assert exit_codes == [3]
    client.set("left/1", "rank 1 on b was stopped")
    with pytest.raises(StageFailed, match=r"^rank 1 on b was stopped$"):
        first.request("compare")


def test_a_training_fits_processes_that_share_its_ranks_equally(group) -> None:
    assert group.fits(Parallel(nodes=2, processes=2))
    assert group.fits(Parallel(nodes=2, processes=4))
    assert not group.fits(Parallel(nodes=2, processes=3))
    assert not group.fits(Parallel(processes=2))
    need_group(Parallel(processes=2))
    started = "2 machines with 2 processes each were started"
    with pytest.raises(PipelineInvalid, match=rf"nodes: 3 and processes: 1, and {started}; run "):
        need_group(Parallel(nodes=3))


def test_several_machines_without_torchrun_are_refused_before_anything_runs(user) -> None:
    expected = (
        r"\.yaml:\d+: stages\[\d\]\.parallel.* \(train\): parallel has nodes: 2 and processes: 1, "
        r"and this process was started alone; run on every machine: torchrun --nnodes 2 "
    )
    with pytest.raises(PipelineInvalid, match=expected):
        Pipeline.from_yaml(user / pipeline(user)).run(user / "out")
    assert not (user / "out" / "artifacts").exists()


def test_processes_that_no_training_is_for_are_refused(user, group) -> None:
    file = user / pipeline(user, "{processes: 2}")
    expected = r"4 processes were started, and no training .* `parallel: {nodes: 2, processes: 2}`"
    with pytest.raises(PipelineInvalid, match=expected):
        check_processes(Pipeline.from_yaml(file), user)


def test_slurm_says_what_torchrun_would(monkeypatch, tmp_path) -> None:
    step = {
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
    }
    assert launched_environment({}) is None
    assert launched_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None, "no srun"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StageFailed, match=r"hostnames node\[1-2\]` does not name .* MASTER_ADDR"):
        launched_environment(step)
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node1; echo node2\n")
    (tmp_path / "scontrol").chmod(0o755)
    found = launched_environment(step)
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "24711",
    }
    assert launched_environment(step | found | {"RANK": "6"})["RANK"] == "6", "torchrun under srun"
