"""Fixtures that several test folders share: the digits example, a small user project."""

import gc
import itertools
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

# Small nets gain nothing from threads, which wait for those of the tests that run beside them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from torch.utils.data import TensorDataset

# Before a test calls a command, which would import settings without their descriptions.
import pipelines.config.pipeline  # noqa: F401
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.data.splits import DataReference, Splits
from compress.profiling.peak_memory import measurement_process
from tests.forking import Forks

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "digits"

MLP = """
from torch import nn

def mlp(hidden=16, classes=3):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, classes))
"""


def pytest_configure() -> None:
    """Let Ctrl-C reach what tests start, also where a shell began this in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests that share what their module makes in one worker; give the others to any.

    What may take long begins first, or one worker would end it while the others wait.
    """
    work = Counter[str]()
    for item in items:
        group = _group(item)
        if group != item.nodeid:
            item.add_marker(pytest.mark.xdist_group(group))
        work[group] += 10 if item.get_closest_marker("slow") else 1
    items.sort(key=lambda item: (-_timeout(item), -work[_group(item)]))


def _group(item: pytest.Item) -> str:
    found = item._fixtureinfo.name2fixturedefs.values()
    shares = any(definition.scope == "module" for (*_, definition) in found)
    return str(item.location[0]) if shares else item.nodeid


def _timeout(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what is imported: it took a third of an export's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how long the quick and the slow tests took, summed over all workers."""
    seconds = {"quick": 0.0, "slow": 0.0}
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds["slow" if "slow" in report.keywords else "quick"] += report.duration
    for kind, total in seconds.items():
        terminalreporter.write_line(f"{kind} tests: {total:.0f} s, summed over workers")


@pytest.fixture(scope="session")
def digits() -> Splits:
    """Return scikit-learn's digits."""
    return DataReference("data:digits", {}, DIGITS, 120).load()


@pytest.fixture(scope="session", autouse=True)
def one_measurer() -> Iterator[None]:
    """Let the process that measures memory live as long as the tests; torch is imported once."""
    with measurement_process():
        yield


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with a user's module, `nets.py`."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "nets.py").write_text(MLP)
    return folder


@pytest.fixture
def mlp(project: Path, tmp_path: Path) -> EagerModel:
    """Return a small model of the user's, 4 features to 3 classes."""
    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 4)),), outputs=(OutputSpec(name="logits"),)
    )
    return import_checkpoint(
        tmp_path / "source", Recipe(factory="nets:mlp"), signature, checkpoint=None, folder=project
    )


@pytest.fixture
def blobs() -> Splits:
    """Return three separable clouds of points."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 3
    x = torch.randn(240, 4, generator=generator) + 3 * torch.eye(4)[y]
    parts = {"train": slice(0, 120), "val": slice(120, 180), "test": slice(180, 240)}
    return Splits({name: TensorDataset(x[s], y[s]) for name, s in parts.items()}, batch_size=32)


@pytest.fixture
def fresh_process(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that runs Python code in a new process elsewhere and gives its output."""
    # The collector looks again and again at what is imported, and once more in the end.
    seldom = "import gc; gc.set_threshold(50_000, 20, 20)\n{}\ngc.freeze()"

    def run(code: str) -> str:
        command = [sys.executable, "-c", seldom.format(code)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@pytest.fixture(scope="session")
def _forks() -> Iterator[Forks]:
    with Forks() as forks:
        yield forks


@pytest.fixture
def fresh_torch(_forks: Forks, tmp_path: Path) -> Callable[[str], str]:
    """Return what `fresh_process` does, for a process that begins with torch: without its import.

    Nothing of ours is imported in it, and nothing that other code did.
    """
    return lambda code: _forks.run(code, tmp_path)
