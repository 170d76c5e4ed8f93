"""Branches as Ray tasks, on a real cluster of this machine."""

import importlib.util
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compress.common.errors import PipelineInvalid, StageFailed, Unavailable
from compress.common.requirements import Requirement
from compress.pipelines import Pipeline
from compress.pipelines.executors import engines
from compress.pipelines.executors.launched import RunEnvironment, read_run_id, write_run_id
from compress.profiling.benchmark import compare_latencies
from compress.training.launch import worker as shared_folder

NETS = """
import os, pathlib, signal, sys, time
from torch import nn

HERE = pathlib.Path("FOLDER")

def mlp(hidden=16):
    if sys.argv[0].endswith("default_worker.py"):
        in_a_worker()
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))

def in_a_worker():
    import ray

    (HERE / f"{os.getpid()}.pid").write_text(ray.get_runtime_context().get_node_id())
    while (HERE / "wait").exists():
        time.sleep(0.05)
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
    with pytest.raises(Unavailable, match=r"^--engine ray: needs no_such_library, .*; install it$"):
        Pipeline.from_yaml(file).run(out, engine="ray")
    assert not out.exists()


def test_a_gpu_is_refused(file, monkeypatch) -> None:
    monkeypatch.setattr(engines, "RAY", Requirement(what="os", install=""))
    file.write_text(FILE.replace("device: cpu", "device: cuda"))
    with pytest.raises(PipelineInvalid, match=r"ray.yaml:2: device: .*use --jobs"):
        Pipeline.from_yaml(file).run(file.parent / "out", engine="ray")


@pytest.mark.soak  # test_jobs.py kills a branch's process too
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
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False
    )
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


def test_a_node_without_the_runs_folder_or_its_packages_is_one_line(
    file, monkeypatch, tmp_path
) -> None:
    folder, store = Path.cwd(), tmp_path / "out" / ".store"
    for made in (store, tmp_path / "late"):
        made.mkdir(parents=True)
    monkeypatch.setattr(shared_folder, "SECONDS_TO_BE_VISIBLE", 0.3)
    write_run_id(store)
    home = RunEnvironment.of_this_process(store)
    home.enter()
    older = replace(home, versions=home.versions | {"torch": "1.0"})
    with pytest.raises(StageFailed, match=r"^node \S+ has torch \S+, and the run has 1.0; "):
        older.enter()
    with pytest.raises(StageFailed, match=r"has no /no/such/folder \(No such file.*; all nodes"):
        replace(home, folder="/no/such/folder").enter()
    write_run_id(store)
    with pytest.raises(StageFailed, match=rf"has another {store}; all"):
        home.enter()
    shutil.rmtree(store)
    write_run_id(tmp_path / "late")
    late = threading.Timer(0.05, shutil.copytree, (tmp_path / "late", store))
    late.start()
    replace(home, run_id=read_run_id(tmp_path / "late")).enter()
    shutil.rmtree(store)
    pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    from compress.pipelines.executors.ray import _run_on_node

    result, _ = _run_on_node("thin", b"is not unpickled", home, 0)
    why = f"thin: node {socket.gethostname()} has no {store}; all nodes"
    assert str(result.error).startswith(why)
    assert Path.cwd() == folder


@pytest.fixture
def nodes(monkeypatch) -> Iterator[tuple]:
    """Return a cluster whose head computes nothing, and two nodes of one core each."""
    ray = pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        added = [cluster.add_node(num_cpus=1) for _ in range(2)]
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster, added
    finally:
        ray.shutdown()
        cluster.shutdown()


# Beside other tests its bucket's server refuses connections at times; alone it passes.
@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("s3fs", "moto", "flask", "flask_cors"))),
    reason="needs s3fs and moto's server: pip install s3fs 'moto[s3]' flask flask-cors",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_two_nodes_make_branches_for_a_bucket_and_one_of_them_is_lost(
    file, nodes, bucket, monkeypatch, capfd
) -> None:
    monkeypatch.setattr(compare_latencies, "__defaults__", (0.001,))
    (cluster, added), folder = nodes, file.parent
    file.write_text(FILE.rpartition("  - ")[0])  # no branch that fails
    (folder / "wait").touch()
    lost: list[str] = []

    def lose_a_node() -> None:
        while len(found := [p.read_text() for p in folder.glob("*.pid")]) < 2 or "" in found:
            time.sleep(0.05)
        lost.extend(found)
        cluster.remove_node(next(n for n in added if n.node_id == found[0]), allow_graceful=False)
        (folder / "wait").unlink()

    loses = threading.Thread(target=lose_a_node, daemon=True)
    loses.start()
    report = Pipeline.from_yaml(file).run(folder / "out", engine="ray", store=bucket)
    loses.join()
    assert {*lost} == {n.node_id for n in added}, "each node had a branch"
    assert report.status == "passed"
    assert "raylet" not in capfd.readouterr().out
    assert "Ray: " in (folder / "out" / "log.jsonl").read_text()

    elsewhere = f"file://{folder / 'shared'}"
    for out, store in (("second", bucket), ("second", elsewhere), ("third", elsewhere)):
        lines: list[str] = []
        run = Pipeline.from_yaml(file).run
        run(folder / out, engine="ray", store=store, announce=lines.append)
        assert not [line for line in lines if "running" in line or "warning" in line], (out, store)
    for name in ("thin-amount=0.25", "thin-amount=0.5"):
        made = [folder / out / "artifacts" / name / "manifest.json" for out in ("out", "third")]
        assert made[0].read_bytes() == made[1].read_bytes()

    cluster.remove_node(next(n for n in added if n.node_id == lost[1]), allow_graceful=False)
    monkeypatch.setattr("compress.pipelines.executors.ray.SECONDS_WITHOUT_NODES", 1.0)
    with pytest.raises(StageFailed, match=r"thin-amount=0.25: the cluster has had no node of 1 co"):
        Pipeline.from_yaml(file).run(folder / "alone", engine="ray")


TRAINING = """\
version: 1
device: cpu
model:
  factory: clusters:mlp
  inputs: [{name: x, shape: [batch, 4]}]
data: {factory: clusters:data, batch_size: 16}
loss: cross_entropy
metric: accuracy
stages:
  - {name: trained, stage: train, epochs: 3, batch_size: 16, optimizer: adamw, keep: last,
     checkpoints: {every_steps: 2}, parallel: PARALLEL}
"""
CLUSTERS = """
import os, pathlib, time
import torch
from torch import nn

HERE = pathlib.Path("FOLDER")

def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        if os.environ.get("RANK") == "1" and index % 5 == 0:  # of a training on two nodes
            (HERE / "samples").open("a").write(".")
            (HERE / "pid").write_text(str(os.getpid()))
            while (HERE / "wait").exists() and (HERE / "samples").stat().st_size > 10:
                time.sleep(0.05)
        drawn = torch.Generator().manual_seed(index)
        return torch.rand(4, generator=drawn) + index % 3, index % 3

def data():
    return {"train": Samples(), "val": Samples()}
"""


@pytest.mark.slow
def test_one_training_goes_over_two_nodes_and_resumes_where_one_of_them_is_lost(
    tmp_path, nodes
) -> None:
    import ray

    (cluster, added), folder = nodes, tmp_path
    lost: list[str] = []
    (folder / "clusters.py").write_text(CLUSTERS.replace("FOLDER", str(folder)))
    (folder / "wait").touch()

    def run(name: str, parallel: str, engine: str = "local") -> dict[str, torch.Tensor]:
        file = folder / f"{name}.yaml"
        file.write_text(TRAINING.replace("PARALLEL", parallel))
        report = Pipeline.from_yaml(file).run(folder / name, engine=engine)
        assert report.status == "passed"
        return load_file(folder / name / "artifacts" / "trained" / "weights.safetensors")

    def lose_a_node() -> None:
        work = folder / "spread" / ".store" / "work"  # no folder that is renamed while it is read
        while not any(work.glob("*/*/checkpoints/step-0*[0-9]")):
            time.sleep(0.05)  # until there is a checkpoint
        rank = (folder / "pid").read_text()
        (table,) = ray.util.placement_group_table().values()
        lost.append(table["bundles_to_node_id"][1])
        cluster.remove_node(next(n for n in added if n.node_id == lost[0]), allow_graceful=False)
        while Path(f"/proc/{rank}/cwd").exists():
            time.sleep(0.05)  # else it may train to the end before it notices
        (folder / "wait").unlink()

    loses = threading.Thread(target=lose_a_node, daemon=True)
    loses.start()
    spread = run("spread", "{nodes: 2, min_nodes: 1}", "ray")
    loses.join(60)
    assert lost
    for name, weight in run("alone", "{}").items():
        torch.testing.assert_close(spread[name], weight, atol=1e-5, rtol=0)
    assert "resumed after" in (folder / "spread" / "log.jsonl").read_text()
