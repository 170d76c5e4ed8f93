"""User code that tries to end the process: no exit code 0 without a report that says `passed`."""

import json
from pathlib import Path

import pytest

from compress.common.errors import CompressError
from compress.pipelines import Pipeline
from compress.pipelines.results.schema import Report
from tests.forking import Commands
from tests.pipelines.conftest import BRIEFLY

PLACES = """
import os, sys, threading
import torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info

PLACE, HOW = "PLACE_HERE", "HOW_HERE"

def leave(place):
    if place != PLACE:
        return
    if HOW == "os._exit":
        os._exit(0)
    raise {
        "exit": SystemExit(0), "none": SystemExit(None), "words": SystemExit("enough"),
        "generator": GeneratorExit(), "keyboard": KeyboardInterrupt(), "base": BaseException("odd"),
        "coded": Coded(),
    }[HOW]

class Coded(Exception):
    exit_code = 0

leave("import")

class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        leave("init")
        self.body = nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))

    def forward(self, x):
        if not torch.compiler.is_compiling():
            leave("forward")
            if self.training:
                leave("forward in training")
            if len(x) == 1:
                leave("forward of one sample")
            if "compress.pipelines.executors.process_worker" in sys.modules:
                leave("forward in a job")
        return self.body(x)

class Samples(Dataset):
    def __init__(self, name):
        generator = torch.Generator().manual_seed(0)
        self.name, self.y = name, torch.arange(60) % 3
        self.x = torch.randn(60, 4, generator=generator) + 3 * torch.eye(4)[self.y]

    def __len__(self):
        leave("len")
        return 60

    def __getitem__(self, index):
        leave("sample")
        leave(f"sample of {self.name}")
        if get_worker_info():
            leave("sample in a worker")
        if "RANK" in os.environ:
            leave("sample in a rank")
        return self.x[index], self.y[index]

def data():
    leave("data")
    return {name: Samples(name) for name in ("train", "val", "test")}

calls = []

def score(outputs, targets):
    leave("metric")
    if not torch.is_grad_enabled() and len(calls) > 3:  # the check calls it for val and test
        leave("metric after the first")
    calls.append(1)
    return float((outputs.argmax(1) == targets).float().mean())
"""
FILE = """\
version: 1
model: {factory: "nets:Net", inputs: [{name: x, shape: [batch, 4]}]}
data: {factory: "nets:data", batch_size: 20}
metric: {name: "nets:score", higher_is_better: true}
stages:
  - {stage: train, epochs: 1, batch_size: 20}
  - {stage: prune_channels, ratio: 0.3, gates: [{gate: max_drop, points: 50}]}
  - {stage: prune_weights, input: train, amount: 0.3, gates: [{gate: min_metric, at: 0.01}]}
"""
CALLED = "user code called sys.exit(0) in nets.py, line "


def project(folder: Path, place: str, how: str = "exit") -> Path:
    """Return a pipeline file whose code leaves at some place."""
    text = PLACES.replace("PLACE_HERE", place).replace("HOW_HERE", how)
    (folder / "nets.py").write_text(text)
    (folder / "small.yaml").write_text(FILE)
    return folder / "small.yaml"


def failure(file: Path, **options) -> CompressError:
    """Return the error of a run that must fail."""
    with pytest.raises(CompressError) as caught:
        Pipeline.from_yaml(file).run(file.parent / "out", **options)
    assert caught.value.exit_code
    return caught.value


@pytest.mark.parametrize(
    ("place", "stage"),
    [
        ("forward", "source"),
        ("forward in training", "train"),
        ("metric after the first", "prune_channels"),  # where a gate judges
    ],
)
def test_code_that_exits_fails_its_stage(tmp_path: Path, place: str, stage: str) -> None:
    file = project(tmp_path, place)
    assert str(failure(file)).startswith(f"{stage}: {CALLED}")
    report = Report.read(tmp_path / "out")
    assert report.status == "failed"
    assert report.failures[0].name == stage


@pytest.mark.parametrize(
    "place",
    # The last two where samples are tried before anything runs.
    ["len", "sample", "sample of val", "forward of one sample", "metric"],
)
def test_data_that_exit_fail_the_run(tmp_path: Path, place: str) -> None:
    assert CALLED in str(failure(project(tmp_path, place)))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("none", "called sys.exit() in nets.py"),
        ("words", "called sys.exit('enough') in nets.py"),
        ("generator", "raised GeneratorExit in nets.py"),
        ("base", "raised BaseException: odd in nets.py"),
    ],
)
def test_whatever_is_no_exception_is_a_failure(tmp_path: Path, how: str, words: str) -> None:
    assert words in str(failure(project(tmp_path, "forward", how)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", CALLED),
        pytest.param("keyboard", "raised KeyboardInterrupt in nets.py", marks=pytest.mark.soak),
    ],
)
def test_the_command_ends_with_1(commands: Commands, tmp_path: Path, how: str, words: str) -> None:
    project(tmp_path, "forward", how)
    done = commands.call("run", "small.yaml", "--json", cwd=tmp_path, first=BRIEFLY)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["status"] == "failed"
    assert f"error: source: user code {words.removeprefix('user code ')}" in done.stderr


def test_other_commands_do_not_end_with_0_either(commands: Commands, tmp_path: Path) -> None:
    project(tmp_path, "forward")
    done = commands.call("check", "small.yaml", "--json", cwd=tmp_path, first=BRIEFLY)
    assert done.returncode == 1, done.stderr
    assert CALLED in json.loads(done.stdout)["error"]["lines"][0]


def test_no_class_of_errors_can_choose_0(commands: Commands, tmp_path: Path) -> None:
    """A user's own, or typer's `Exit`, whose `exit_code` is 0."""
    project(tmp_path, "len", "coded")
    done = commands.call("check", "small.yaml", cwd=tmp_path, first=BRIEFLY)
    assert done.returncode != 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)  # a parent that waits for such a rank would wait for ever
@pytest.mark.parametrize(
    ("place", "how"),
    [
        ("forward in a job", "exit"),
        ("sample in a worker", "os._exit"),
        # test_fit_processes.py has a rank that exits.
        pytest.param("sample in a rank", "exit", marks=pytest.mark.soak),
        pytest.param("forward in a job", "os._exit", marks=pytest.mark.soak),
        pytest.param("sample in a worker", "exit", marks=pytest.mark.soak),
        pytest.param("sample in a rank", "os._exit", marks=pytest.mark.soak),
    ],
)
def test_a_child_that_exits_with_0_has_failed(tmp_path: Path, place: str, how: str) -> None:
    file = project(tmp_path, place, how)
    options = {}
    if place == "forward in a job":
        options["jobs"] = 2
    elif place == "sample in a worker":
        file.write_text(FILE.replace("batch_size: 20}", "batch_size: 20, loader: {workers: 1}}", 1))
    else:
        two = "epochs: 1, parallel: {strategy: ddp, processes: 2}"
        file.write_text(FILE.replace("epochs: 1", two))
    error = failure(file, **options)
    assert "sys.exit(0)" in str(error) if how == "exit" else "ended" in str(error)
    if place == "sample in a worker":  # read for their hashes, before the run begins
        assert not (tmp_path / "out/report.json").exists()
    else:
        assert Report.read(tmp_path / "out").status == "failed"
