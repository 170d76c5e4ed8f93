"""Branches as Ray tasks, on a real cluster of this machine."""

import os
from pathlib import Path

import pytest

from compress.core.errors import PipelineInvalid, Unavailable
from compress.core.requirement import Requirement
from pipelines import engines
from pipelines.pipeline import Pipeline

NETS = """
import os, pathlib, signal, sys
from torch import nn

HERE = pathlib.Path("FOLDER")

def mlp(hidden=16):
    if sys.argv[0].endswith("default_worker.py"):
        in_a_worker()
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))

def in_a_worker():
    (HERE / f"{os.getpid()}.pid").touch()
    for marker in HERE.glob("die*"):
        marker.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
"""
FILE = """\
version: 1
device: cpu
model:
  factory: nets:mlp
  inputs: [{name: x, shape: [batch, 4]}]
stages:
  - {name: thin, stage: prune_weights, matrix: {amount: [0.25, 0.5]}}
  - {name: bare, stage: prune_channels, input: source, ratio: 0.5, exclude: ["*"]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "nets.py").write_text(NETS.replace("FOLDER", str(tmp_path)))
    (tmp_path / "ray.yaml").write_text(FILE)
    return tmp_path / "ray.yaml"


def test_an_engine_that_is_not_installed_is_refused_before_anything_runs(file, monkeypatch) -> None:
    missing = Requirement(what="no_such_library", install="install it")
    monkeypatch.setattr(engines, "RAY", missing)
    out = file.parent / "out"
    with pytest.raises(Unavailable, match=r"^--engine ray needs no_such_library, .*; install it$"):
        Pipeline.from_yaml(file).run(out, engine="ray")
    assert not out.exists()


def test_a_gpu_is_refused(file, monkeypatch) -> None:
    monkeypatch.setattr(engines, "RAY", Requirement(what="os", install=""))
    file.write_text(FILE.replace("device: cpu", "device: cuda"))
    with pytest.raises(PipelineInvalid, match=r"ray.yaml:2: device: .*use --jobs"):
        Pipeline.from_yaml(file).run(file.parent / "out", engine="ray")


@pytest.mark.slow
def test_a_branch_whose_process_is_killed_is_made_again_and_no_other_is_lost(
    file, monkeypatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    folder = file.parent
    (folder / "die").touch()
    with pytest.raises(Exception, match="no channel can be removed") as turn:
        Pipeline.from_yaml(file).run(folder / "turn")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        with pytest.raises(type(turn.value), match=r"^bare: no channel can be removed"):
            Pipeline.from_yaml(file).run(folder / "out", engine="ray")
    finally:
        ray.shutdown()
    assert not (folder / "die").exists()
    workers = {int(path.stem) for path in folder.glob("*.pid")}
    assert len(workers) >= 2
    assert os.getpid() not in workers
    for name in ("thin-amount=0.25", "thin-amount=0.5"):
        files = [folder / out / "artifacts" / name / "manifest.json" for out in ("turn", "out")]
        assert files[0].read_bytes() == files[1].read_bytes()
