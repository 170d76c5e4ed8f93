"""A small project of a user's: an MLP on separable clouds, trained, pruned and exported."""

import math
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compress.pipelines import Pipeline
from compress.pipelines.results import measurements
from compress.pipelines.results.measurements import SpeedupReport
from compress.pipelines.results.schema import Report
from compress.profiling import peak_memory, quantiles
from compress.profiling.benchmark import compare_latencies, compare_latency
from compress.pruning import channel_pruner, sensitivity_analysis

RUNTIME_OF = measurements.runtime_of
MEASURE_PEAK = peak_memory.peak_memory
DEADLINE = 120
"""Seconds for a server to begin, however busy the machine is."""
NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def mlp(hidden=32):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 3))

def data(shift=0.0):
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 3
    x = torch.randn(240, 4, generator=generator) + 3 * torch.eye(4)[y] + shift
    parts = {"train": slice(0, 120), "val": slice(120, 180), "test": slice(180, 240)}
    return {name: TensorDataset(x[s], y[s]) for name, s in parts.items()}
"""

FILE = """\
version: 1
model:
  factory: nets:mlp
  inputs: [{name: x, shape: [batch, 4]}]
data: {factory: "nets:data", arguments: {shift: 0.0}}
stages:
  - {stage: train, epochs: 3, batch_size: 24}
  - stage: prune_channels
    ratio: 0.4
    gates: [{gate: max_drop, points: 50}]
  - stage: export_onnx
    gates: [{gate: parity, atol: 1e-4}]
"""

BRIEFLY = """
import math
from compress.pipelines.results import measurements
from compress.profiling import benchmark, peak_memory, quantiles
from compress.profiling.benchmark import CallTimer
from compress.pruning import channel_pruner
measurements.runtime_of = lambda *_: None
CallTimer.doubt = ""  # a machine that is busy
channel_pruner.MEASURED_SECONDS = 0.001
benchmark.compare_latencies.__defaults__ = (0.001,)
benchmark.compare_latency.__defaults__ = (0.02,)
benchmark.OPENING_SECONDS = 0.0
quantiles.WIDEST = math.inf
peak_memory.peak_memory = lambda *_: 0.0
"""
"""What a command in a process of its own runs first: no process that measures memory is started."""


@contextmanager
def measured_briefly(*, same_runtime: bool = False, memory: bool = False) -> Iterator[None]:
    """Measure for a moment in a block: how long models take is of no interest here.

    And only if asked in turn with the uncompressed model in an export's runtime: that is exported
    for it, which takes as long as the stage's own export. Nor without being asked how much memory
    each model takes: the process that is forked for it makes a third of the cost of a small run.
    """
    with pytest.MonkeyPatch.context() as patch:
        peak = MEASURE_PEAK if memory else lambda *_: 1.0
        patch.setattr(peak_memory, "peak_memory", peak)
        runtime_of = RUNTIME_OF if same_runtime else lambda *_: None
        patch.setattr(measurements, "runtime_of", runtime_of)
        patch.setattr(compare_latencies, "__defaults__", (0.001,))
        # Searches choose by it: long enough for half of the channels to be faster.
        patch.setattr(compare_latency, "__defaults__", (0.02,))
        for module in (channel_pruner, sensitivity_analysis):
            patch.setattr(module, "MEASURED_SECONDS", 0.001)
        patch.setattr("compress.export.latency.kernels.KERNEL_SECONDS", 0.001)
        patch.setattr("compress.pipelines.auto.cost_models.FITTED_MODELS", 6)
        # So few calls are seldom sure.
        patch.setattr(quantiles, "WIDEST", math.inf)
        # By chance some would be slower than the model that they were made of.
        slower = property(lambda found: (found.speedup_interval or (1, 1))[1] < 0.5)
        patch.setattr(SpeedupReport, "is_slower", slower)
        yield


@pytest.fixture(autouse=True)
def quick_measurements() -> Iterator[None]:
    """Spend a test's time on what it is about; fixtures of a wider scope do so themselves."""
    with measured_briefly():
        yield


class Project:
    """A folder with the user's files, and what running them said."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file, self.out = folder, folder / "small.yaml", folder / "out"
        self.said: list[str] = []
        self.memory = False
        """Whether runs measure how much memory models take."""

    def edit(self, old: str, new: str) -> None:
        """Change the pipeline file."""
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))

    def run(self, *, same_runtime: bool = False, **options) -> Report:
        """Run the pipeline file as it is now."""
        self.said.clear()
        pipeline = Pipeline.from_yaml(self.file)
        with measured_briefly(same_runtime=same_runtime, memory=self.memory):
            return pipeline.run(self.out, announce=self.said.append, **options)

    def ran(self) -> dict[str, str]:
        """Return the stages that were run, and why."""
        lines = [line.partition(": running (") for line in self.said]
        return {name: why.removesuffix(")") for name, found, why in lines if found}


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Return a project that has been run once; tests must not change it."""
    folder = tmp_path_factory.mktemp("finished_run")
    (folder / "nets.py").write_text(NETS)
    (folder / "small.yaml").write_text(FILE)
    project = Project(folder)
    project.memory = True
    project.run(same_runtime=True)
    return project


@pytest.fixture
def project(finished_run: Project, tmp_path: Path) -> Project:
    """Return a copy of the project that was run once, store included."""
    return Project(Path(shutil.copytree(finished_run.folder, tmp_path / "user")))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Return the address of an S3-compatible server, moto's, that ends with the tests."""
    script = Path(__file__).with_name("s3_here.py")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # so that what is sent to the group of the tests is not for it
    )
    lines: queue.Queue[str] = queue.Queue()
    threading.Thread(target=lambda: lines.put(process.stdout.readline()), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{int(lines.get(timeout=DEADLINE))}"
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def bucket(server, tmp_path, monkeypatch) -> str:
    """Return the URL of a new bucket, with the credentials where s3fs looks for them."""
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-mine")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = f"bucket-{abs(hash(tmp_path)):x}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"
