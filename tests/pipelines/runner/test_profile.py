"""`compress run --profile`: counts of a small pipeline, so that they cannot grow unseen."""

import json
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch

from compress.common import atomic_files
from compress.common.counts import counted
from compress.common.errors import GateRefused
from compress.common.forward import count_forwards
from compress.pipelines import Pipeline
from compress.pipelines.results import measurements
from compress.pipelines.results.schema import Report
from compress.pipelines.system.run_profile import Profiler
from compress.profiling import benchmark
from compress.profiling.benchmark import InterleavedLatencies, Latency, compare_latency
from tests.pipelines.conftest import FILE, NETS, RUNTIME_OF, Project

ONE = Latency(batch=1, p50=1, p95=1, p50_interval=(1, 1), p95_interval=(1, 1), outliers=0)
THREE = InterleavedLatencies((ONE,) * 3, ((1.0,) * 8,) * 3)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("profiled")
    (folder / "nets.py").write_text(NETS)
    (folder / "p.yaml").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        # Files that have just been written are hashed again while they may change unnoticed.
        patch.setattr(atomic_files, "RACY_SECONDS", -1.0)
        # How often calls are timed depends on how long they take.
        patch.setattr(benchmark, "compare_latencies", lambda *_, **__: THREE)
        return Pipeline.from_yaml(folder / "p.yaml").run(folder / "out", profile=True)


def test_a_run_makes_no_more_calls_traces_and_processes_than_it_did(profiled: Report) -> None:
    assert profiled.profile
    stages, total = profiled.profile.stages, profiled.profile.total
    # Two of pruning: the model, and what is left of it; one of the export, and one of the file that
    # its speed is compared with.
    assert total["traces"] == 4
    # The metric on 60 samples of `val`, and 65 rows for batch dependence.
    for name in ("train", "prune_channels"):
        assert stages[name].evaluation["forwards.eager.rows"] <= 60 + 65
    # The same: the gate `parity` reads the answers that the metric was computed from. And 16, on
    # which the file that its speed is compared with is proven.
    assert stages["export_onnx"].evaluation["forwards.onnx.rows"] <= 60 + 65 + 16
    assert stages["export_onnx"].run["forwards.onnx.rows"] <= 90
    # Two that ask for memory, and a fork of theirs.
    assert total["processes"] <= 3
    assert total["hashed.bytes"] <= 150_000


WIDE = """
from torch import nn

def wide():
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024))
"""
EXPORT = """version: 1
name: wide
model: {factory: "wide:wide", inputs: [{name: x, shape: [batch, 1024]}]}
stages: [{stage: export_onnx}]
"""


@pytest.mark.usefixtures("profiled")  # which imports the modules that would be read here
def test_a_large_file_is_traced_and_hashed_once_and_read_a_few_times(tmp_path, monkeypatch) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    (tmp_path / "p.yaml").write_text(EXPORT)
    monkeypatch.setattr(atomic_files, "RACY_SECONDS", -1.0)
    timed = []

    def compare(models, *_, **__):
        timed.append(len(models))
        return THREE

    monkeypatch.setattr(benchmark, "compare_latencies", compare)
    monkeypatch.setattr(measurements, "runtime_of", RUNTIME_OF)
    report = Pipeline.from_yaml(tmp_path / "p.yaml").run(tmp_path / "out", profile=True)
    assert report.profile
    total, size = report.profile.total, 4 * 2 * 1024 * 2048
    # The file is that of the uncompressed model, which speeds are compared with.
    assert total["traces"] == 1
    # The model's file and the exported one.
    assert total["hashed.bytes"] <= 2.1 * size
    assert total["read.bytes"] <= 12.5 * size
    same = report.stages[-1].measurements.same_runtime
    assert same.speedup == 1
    # The imported model has its own figures from the comparison with it.
    assert timed == [2]
    assert report.baseline.latency_ms.p50 == 1


PRUNED = """version: 1
name: wide
model: {factory: "wide:wide", inputs: [{name: x, shape: [batch, 1024]}]}
stages:
  - {stage: prune_channels, ratio: 0.5, gates: [{gate: max_file_size, mebibytes: 1}]}
  - {stage: export_onnx}
"""


def test_a_model_is_timed_where_no_export_of_it_was(tmp_path, monkeypatch) -> None:
    (tmp_path / "wide.py").write_text(WIDE)
    (tmp_path / "p.yaml").write_text(PRUNED)
    monkeypatch.setattr(benchmark, "compare_latencies", lambda *_, **__: THREE)
    with pytest.raises(GateRefused):
        Pipeline.from_yaml(tmp_path / "p.yaml").run(tmp_path / "out")
    assert Report.read(tmp_path / "out").baseline.latency_ms.p50 == 1


def test_the_profile_is_in_the_report_and_in_words(profiled: Report) -> None:
    assert profiled.profile
    stored = json.loads(profiled.model_dump_json())["profile"]
    assert stored["stages"]["train"]["run"]["cpu_seconds"] > 0
    assert stored["total"]["read.bytes"] > stored["stages"]["train"]["run"]["read.bytes"]
    assert any(
        line.startswith("export_onnx evaluation") and "forwards.onnx.rows 141" in line
        for line in profiled.profile.lines()
    )


def test_a_run_is_not_profiled_unless_asked(finished_run: Project) -> None:
    assert json.loads((finished_run.out / "report.json").read_text())["profile"] is None


def test_counting_takes_no_part_in_a_latency() -> None:
    def predict(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x,)

    def counts() -> dict[str, int]:
        return {name: n for name, n in counted().items() if name.startswith("forwards.")}

    before, calls = counts(), []
    opener = partial(nullcontext, count_forwards(lambda x: calls.append(1) or predict(x), "timed"))
    compare_latency(opener, opener, [(torch.zeros(2, 1),)], 1e-9, threads=1)
    assert counts() == before | {
        "forwards.timed.calls": before.get("forwards.timed.calls", 0) + len(calls)
    }


def test_the_cpu_time_of_a_child_that_still_runs_is_counted() -> None:
    profiler = Profiler(is_on=True)
    spin = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout and child.stdin
        child.stdout.readline()
        total = profiler.profile().total
        child.stdin.close()
    assert total["cpu_seconds"] >= 0.25
    assert total["processes"] == 1
