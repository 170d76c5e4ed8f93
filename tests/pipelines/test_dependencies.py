"""A result is taken from the store only where all that decided it is as it was."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compress.common.errors import PipelineInvalid
from compress.data import fingerprint
from compress.pipelines import Pipeline
from compress.pipelines.commands.cache_miss import why
from compress.pipelines.results.schema import Report
from tests.pipelines.conftest import Project

NETS = """
import importlib
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

HERE = Path(__file__).parent
HIDDEN = int(os.environ.get("HIDDEN_UNITS", "16"))


class Rows(Dataset):
    \"\"\"Reads each row when it is asked for.\"\"\"

    def __init__(self, name, count):
        self.name, self.count = name, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        with open(f"{self.name}.bin", "rb") as stream:
            stream.seek(2 * index)
            label, seed = stream.read(2)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(4, generator=generator) + 3 * torch.eye(4)[label], label


def mlp():
    width = importlib.import_module("widths").WIDTH
    return nn.Sequential(nn.Linear(4, HIDDEN + width), nn.ReLU(), nn.Linear(HIDDEN + width, 3))


def data():
    import shared_settings

    importlib.import_module("settings_here")
    (HERE / "log.txt").write_text("an output of its own")
    (HERE / "log.txt").read_text()
    os.environ["SET_BY_THE_DATA"] = "1"
    os.environ["SET_BY_THE_DATA"]
    return {
        name: Rows(str(HERE / name), count)
        for name, count in (("train", 90), ("val", 40), ("test", 40))
    }
"""
METRIC = """
from pathlib import Path

def weighted(outputs, targets):
    weight = float((Path(__file__).parent / "weight.txt").read_text())
    return weight * float((outputs.argmax(1) == targets).float().mean())
"""
MODULES = ("nets", "metrics", "widths", "shared_settings", "settings_here")
FILE = """\
version: 1
model: {factory: "nets:mlp", inputs: [{name: x, shape: [batch, 4]}]}
data: {factory: "nets:data"}
metric: {name: "metrics:weighted", higher_is_better: true}
stages:
  - {stage: train, epochs: 1, batch_size: 30, keep: last}
  - {name: exported, stage: export_program, gates: [{gate: min_metric, at: 0.0}]}
"""


def rows(count: int) -> bytes:
    return bytes(value for index in range(count) for value in (index % 3, index % 251))


@contextmanager
def modules_of(elsewhere: Path) -> Iterator[None]:
    """Find the modules outside of the project, as they were at first, and import all anew."""
    (elsewhere / "shared_settings.py").write_text("A = 1\n")
    (elsewhere / "widths.py").write_text("WIDTH = 2\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(elsewhere)
        patch.delenv("HIDDEN_UNITS", raising=False)
        patch.setattr(fingerprint, "SAMPLED_FOR_FINGERPRINT", 8)
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        yield
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def finished_user(finished_run, tmp_path_factory):
    """Return a project that has run, whose code reads files, variables and modules anywhere."""
    folder = tmp_path_factory.mktemp("finished_user") / "user"
    project = Project(Path(shutil.copytree(finished_run.folder, folder)))
    for name, count in (("train", 90), ("val", 40), ("test", 40)):
        (folder / f"{name}.bin").write_bytes(rows(count))
    (folder / "nets.py").write_text(NETS)
    (folder / "metrics.py").write_text(METRIC)
    (folder / "settings_here.py").write_text("B = 1\n")
    (folder / "weight.txt").write_text("1.0")
    project.file.write_text(FILE)
    project.elsewhere = tmp_path_factory.mktemp("elsewhere")
    with modules_of(project.elsewhere):
        project.run()
        project.run()
    assert project.ran() == {}, project.said
    return project


@pytest.fixture
def user(finished_user, tmp_path):
    """Return a copy of that project, which finds nothing to run."""
    project = Project(Path(shutil.copytree(finished_user.folder, tmp_path / "user")))
    project.elsewhere = finished_user.elsewhere
    with modules_of(project.elsewhere):
        yield project


def relabel(file: Path, index: int) -> None:
    content = bytearray(file.read_bytes())
    content[2 * index] = (content[2 * index] + 1) % 3
    file.write_bytes(content)


def metric(report: Report) -> float:
    return report.stages[-1].measurements.metric.value


def test_one_changed_label_among_many_lazily_read_ones_of_val_is_seen(user) -> None:
    before = metric(Report.read(user.out))
    for index in range(1, 40, 2):
        relabel(user.folder / "val.bin", index)
    report = user.run()
    assert metric(report) != before
    before = report.test.values
    for index in range(1, 40, 2):
        relabel(user.folder / "test.bin", index)
    assert user.run().test.values != before


@pytest.mark.slow
def test_what_the_data_read_of_a_split_that_is_sampled_is_hashed_as_files(user) -> None:
    relabel(user.folder / "train.bin", 1)  # every twelfth sample is hashed
    found = why(Pipeline.from_yaml(user.file), user.out, "train")
    assert found.does == "runs (file train.bin changed)"
    user.run()
    assert user.ran()["train"] == "file train.bin changed"
    report = user.run()
    assert user.ran() == {}
    (warning,) = (line for line in report.warnings if line.startswith("data.train"))
    assert warning.startswith("data.train: sampled (8 of 90 samples hashed)")
    assert "train" in warning.partition("(train")[1]


@pytest.mark.slow
def test_the_samples_that_a_stage_calibrates_on_are_part_of_it(user) -> None:
    stage = "  - {stage: quantize_static, input: source, calibration_samples: 16}\n"
    user.file.write_text(user.file.read_text() + stage)

    def drawn() -> object:
        found = why(Pipeline.from_yaml(user.file), user.out, "quantize_static")
        return next(part.value for part in found.parts if part.what == "calibration")

    before = drawn()
    relabel(user.folder / "train.bin", 4)
    assert drawn() == before
    relabel(user.folder / "train.bin", 3)  # one of the 16
    assert drawn() != before


@pytest.mark.slow
def test_modules_found_elsewhere_and_by_name_are_part_of_what_is_asked(user) -> None:
    module = user.elsewhere / "shared_settings.py"
    module.write_text("A = 2\n")
    user.run()
    assert user.ran()["train"] == f"file {module} changed"
    (user.folder / "settings_here.py").write_text("B = 2\n")
    user.run()
    assert user.ran()["train"] == "file settings_here.py changed"
    module = user.elsewhere / "widths.py"
    module.write_text("WIDTH = 3\n")
    user.run()
    assert user.ran()["source"] == f"file {module} changed"
    assert Report.read(user.out).stages[0].measurements.parameters == 4 * 19 + 19 + 19 * 3 + 3


@pytest.mark.slow
def test_an_environment_variable_that_user_code_asks_for_is_part_of_it(user, monkeypatch) -> None:
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    user.run()
    assert user.ran() == {}
    monkeypatch.setenv("HIDDEN_UNITS", "20")
    assert why(Pipeline.from_yaml(user.file), user.out, "source").does == (
        "runs (environment variable HIDDEN_UNITS is set now)"
    )
    user.run()
    assert user.ran()["source"] == "environment variable HIDDEN_UNITS is set now"
    assert Report.read(user.out).stages[0].measurements.parameters == 4 * 22 + 22 + 22 * 3 + 3
    monkeypatch.setenv("HIDDEN_UNITS", "24")
    user.run()
    assert user.ran()["source"] == "environment variable HIDDEN_UNITS changed"


@pytest.mark.slow
def test_what_a_metric_reads_is_part_of_its_figures(user) -> None:
    before = Report.read(user.out)
    (user.folder / "weight.txt").write_text("0.5")
    report = user.run()
    assert "source" not in user.ran()
    assert metric(report) == pytest.approx(metric(before) / 2)
    assert report.stages[-1].verdicts[0].value == pytest.approx(metric(report))
    assert report.test.values["exported"] == pytest.approx(before.test.values["exported"] / 2)


@pytest.mark.slow
def test_what_is_declared_is_part_of_everything(user, monkeypatch) -> None:
    (user.folder / "tables").mkdir()
    table = user.folder / "tables" / "labels.parquet"
    table.write_bytes(b"1")
    declared = "depends: {files: [tables], environment: [SITE]}\nstages:"
    user.edit("stages:", declared)
    user.run()
    user.run()
    assert user.ran() == {}
    table.write_bytes(b"2")
    assert why(Pipeline.from_yaml(user.file), user.out, "source").does == (
        "runs (file tables/labels.parquet changed)"
    )
    user.run()
    assert user.ran()["train"] == "file tables/labels.parquet changed"
    monkeypatch.setenv("SITE", "north")
    user.run()
    assert set(user.ran().values()) == {"environment variable SITE is set now"}
    user.edit("tables]", "missing.csv]")
    with pytest.raises(PipelineInvalid, match=r"depends\.files\[0\].*no 'missing.csv' in"):
        user.run()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["workers", pytest.param("ranks", marks=pytest.mark.soak)])
def test_what_other_processes_read_is_followed(user, how) -> None:
    jobs = 2 if how == "workers" else None
    if how == "ranks":
        parallel = "parallel: {strategy: ddp, processes: 2}"
        user.edit("keep: last", f"keep: best, {parallel}")
    user.run(jobs=jobs, force=True)
    user.run()
    assert user.ran() == {}
    (user.folder / "weight.txt").write_text("0.25")
    user.run()
    assert user.ran()["train"] == "file weight.txt changed"


@pytest.mark.slow
def test_another_checkout_of_the_same_code_takes_what_a_shared_store_holds(
    user, tmp_path, monkeypatch
) -> None:
    store = f"file://{tmp_path / 'shared'}"
    user.run(store=store)
    other = Project(Path(shutil.copytree(user.folder, tmp_path / "another" / "checkout")))
    shutil.rmtree(other.out)
    other.run(store=store)
    assert other.ran() == {}
    (other.folder / "train.bin").write_bytes(rows(89) + b"\0\0")
    shutil.rmtree(other.out)
    other.run(store=store)
    assert other.ran()["train"] == "file train.bin changed"
    user.run(store=store)
    assert user.ran() == {}, "its own is not touched by what another machine uploads"
