"""A run of cached results, and a second check, use what is known of model and data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compress.data.splits import DataReference
from compress.pipelines import Pipeline
from compress.pipelines.commands.check import check_pipeline
from compress.pipelines.planning.planner import build_plan
from compress.pipelines.runner.inputs import INPUTS_FILE, load_inputs
from compress.pipelines.store.local import Store
from tests.pipelines.conftest import Project


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the factories that were called."""
    called: list[str] = []
    load = DataReference.load

    def counting(self: DataReference) -> object:
        called.append(self.factory)
        return load(self)

    monkeypatch.setattr(DataReference, "load", counting)
    return called


def _changed(project: Project, old: str, new: str) -> None:
    nets = project.file.with_name("nets.py")
    assert old in nets.read_text()
    nets.write_text(nets.read_text().replace(old, new))


def test_cached_results_need_no_data(project: Project, loads: list[str]) -> None:
    project.run()
    before = len(loads)
    project.run()
    assert project.ran() == {} and len(loads) == before
    # Of what was remembered, the data are loaded once a stage runs.
    project.run(start="export_onnx")
    assert "export_onnx" in project.ran() and len(loads) > before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import torch\n", "import time\nimport torch\n"),  # it may ask the clock
        ("def data(", "import os\nos.listdir('.')\n\ndef data("),
        ("def data(", "import os\nHERE = os.path.exists('labels.csv')\n\ndef data("),
        ("def data(", "import numpy as np\nNOISE = np.random.rand()\n\ndef data("),
        ("manual_seed(0)", "manual_seed(torch.seed() % 2**31)"),
        ("TensorDataset(x[s], y[s])", "torch.utils.data.Subset(TensorDataset(x, y), range(9))"),
        ("def data(", "import os\nos.environ['LABELS'] = 'a'\n\ndef data("),
        ("def data(", "open('log.txt', 'w').close()\n\ndef data("),
        ("def data(", "CLASSES = {'cat', 'dog'}  # in another order in each process\n\ndef data("),
    ],
)
def test_data_that_unrecorded_reads_may_decide_are_loaded(
    project: Project, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    monkeypatch.chdir(project.folder)
    assert _is_kept(project)
    _changed(project, old, new)
    assert not _is_kept(project)


def _is_kept(project: Project) -> bool:
    """Whether data that are loaded now are remembered."""
    pipeline, file = Pipeline.from_yaml(project.file), project.folder / INPUTS_FILE
    file.unlink(missing_ok=True)
    surroundings = Store(project.out / ".store", folder=project.folder).surroundings
    inputs = load_inputs(pipeline, build_plan(pipeline), file, surroundings)
    inputs.keep(inputs.data.contents(), (), surroundings)
    return file.exists()


def test_a_second_check_of_an_unchanged_file_loads_nothing(
    project: Project, loads: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = check_pipeline(project.file, models=True)
    before = len(loads)
    assert check_pipeline(project.file, models=True) == first and len(loads) == before
    monkeypatch.setenv("SOME_LIBRARY_READS_IT", "1")
    assert check_pipeline(project.file, models=True) == first and len(loads) > before


@pytest.mark.slow
def test_cached_results_and_a_second_check_need_no_torch(project: Project, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-X", "importtime", "-m", "compress.cli"]
    for arguments in (["run", "--out", str(project.out)], ["check"]):
        for is_second in (False, True):
            done = subprocess.run(
                [*command, arguments[0], str(project.file), *arguments[1:], "--quiet"],
                cwd=project.folder,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
            assert ("torch" in imported) is not is_second
