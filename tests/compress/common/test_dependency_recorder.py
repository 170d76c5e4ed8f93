"""What counts as read by user code: its own files, variables and modules, and no library's."""

import importlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import Dataset

from compress.common.dependency_recorder import Recording, recording, recording_paused
from compress.common.factories import resolve
from compress.core.context import Context
from compress.core.metrics import Metric
from compress.data import fingerprint
from compress.data.loader_config import Loading
from compress.data.splits import DataReference, Splits


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "labels.npy"
    np.save(path, np.arange(3))
    return path


def test_files_count_however_a_library_opens_them(file: Path, tmp_path: Path) -> None:
    missing = tmp_path / "override.json"
    with recording() as found:
        np.load(file)
        with pytest.raises(FileNotFoundError):
            missing.read_text()
        np.save(file, np.arange(3))  # after it was read
        (tmp_path / "log").write_text("an output")
        (tmp_path / "log").read_text()
        Path(json.__file__).read_text()
        tempfile.gettempdir()
        with recording_paused():
            Path(__file__).read_text()
    depends = found.dependencies(tmp_path)
    assert set(depends.files) == {"labels.npy", "override.json"}
    assert depends.files["override.json"] is None
    assert depends.change(tmp_path) == ""
    missing.write_text("{}")
    assert depends.change(tmp_path) == "file override.json is there now"
    missing.unlink()
    np.save(file, np.arange(3)[::-1])
    assert depends.change(tmp_path) == "file labels.npy changed"
    file.unlink()
    assert depends.change(tmp_path) == "file labels.npy is gone"


def test_what_changes_nothing_but_the_bytes_is_seen(file: Path, tmp_path: Path) -> None:
    with recording() as found:
        file.read_bytes()
    depends, before = found.dependencies(tmp_path), file.stat()
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert depends.change(tmp_path) == "file labels.npy changed"


WAYS = {
    "environ.copy": lambda: os.environ.copy()["WAY"],
    "copy.get": lambda: os.environ.copy().get("WAY"),
    "in copy": lambda: "WAY" in os.environ.copy(),
    "copy.pop": lambda: os.environ.copy().pop("WAY"),
    "copy.pop with a default": lambda: os.environ.copy().pop("WAY", None),
    "environb": lambda: os.environb[b"WAY"],
    "getenvb": lambda: os.getenvb(b"WAY"),
    "expandvars": lambda: os.path.expandvars("$WAY/x"),
    "format": lambda: "{WAY}".format(**os.environ),
    "items": lambda: {k: v for k, v in os.environ.items() if k.startswith("WAY")},
    "of a copy": lambda: dict(os.environ.copy())["WAY"],
    "names": lambda: [k for k in os.environ if k.startswith("WAY")],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_variable_counts_however_it_is_read(monkeypatch, tmp_path: Path, way) -> None:
    monkeypatch.setenv("WAY", "1")
    with recording() as found:
        WAYS[way]()
    depends = found.dependencies(tmp_path)
    assert way == "names" or depends.environment.keys() >= {"WAY"}
    assert depends.change(tmp_path) == ""
    monkeypatch.delenv("WAY")
    assert depends.change(tmp_path).startswith("environment variable")


def test_another_variable_counts_where_all_are_listed(monkeypatch, tmp_path: Path) -> None:
    with recording() as found:
        assert len([name for name in os.environ if name.startswith("OURS_")]) == 0
    depends = found.dependencies(tmp_path)
    assert depends.change(tmp_path) == ""
    monkeypatch.setenv("OURS_WIDTH", "8")
    assert depends.change(tmp_path) == "environment variables are set or gone, and code lists them"


def test_variables_count_that_user_code_asks_for_itself(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASKED", "a secret value")
    monkeypatch.setenv("ASKED_OF_A_LIBRARY", "1")
    for name in ("UNSET", "SET_BY_ITSELF", "DEFAULTED"):
        monkeypatch.delenv(name, raising=False)
    with recording() as found:
        assert os.environ["ASKED"] == os.getenv("ASKED") == os.environ.get("ASKED")
        assert "UNSET" not in os.environ
        os.environ["SET_BY_ITSELF"] = "1"
        assert os.environ["SET_BY_ITSELF"] == "1"
        assert os.environ.setdefault("DEFAULTED", "1") == "1"
        tempfile.gettempdir()
        subprocess.run([sys.executable, "-c", ""], env=os.environ.copy(), check=True)
    depends = found.dependencies(tmp_path)
    assert set(depends.environment) == {"ASKED", "UNSET"}
    assert "a secret value" not in depends.model_dump_json()
    assert depends.change(tmp_path) == ""
    monkeypatch.setenv("ASKED", "another")
    assert depends.change(tmp_path) == "environment variable ASKED changed"
    monkeypatch.delenv("ASKED")
    assert depends.change(tmp_path) == "environment variable ASKED is not set any more"
    for name in ("SET_BY_ITSELF", "DEFAULTED"):
        monkeypatch.delenv(name)


def test_a_recording_travels_and_counts_where_others_are_under_way(file: Path) -> None:
    with recording() as outer, recording() as inner:
        file.read_bytes()
    assert outer == inner == Recording.from_json(outer.to_json())
    with recording() as later:
        pass
    assert later == Recording()


def test_a_module_imported_before_counts_for_whoever_names_it(tmp_path, monkeypatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "tables_of_ours.py").write_text("A = 1\n")
    code = "import importlib\nimport tables_of_ours\n\ndef {0}():\n    return tables_of_ours.A\n"
    for name in ("first_of_ours", "second_of_ours"):
        (tmp_path / f"{name}.py").write_text(code.format("asked"))
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(elsewhere)
    found = []
    for name in ("first_of_ours", "second_of_ours", "first_of_ours"):
        with recording() as recorded:
            assert resolve(f"{name}:asked", tmp_path)() == 1
        found.append({Path(path).name for path in recorded.files})
    assert all("tables_of_ours.py" in names for names in found)
    (elsewhere / "tables_of_ours.py").write_text("A = 22\n")
    assert resolve("second_of_ours:asked", tmp_path)() == 22


INSTALLED = """
import numpy as np
class Rows:
    def __init__(self, file):
        self.file = file
    def __getitem__(self, index):
        return np.load(self.file)[index]
"""


def test_what_an_installed_factory_opens_counts_if_it_is_named_itself(
    file: Path, tmp_path: Path, monkeypatch
) -> None:
    for name in ("theirs_named", "theirs_unnamed"):
        package = tmp_path / "site-packages" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("from .making import make\n")
        (package / "making.py").write_text("from .rows import Rows\ndef make(f): return Rows(f)\n")
        (package / "rows.py").write_text(INSTALLED)
        for module in (name, f"{name}.making", f"{name}.rows"):
            monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    rows = resolve("theirs_named:make", tmp_path / "pipeline")(file)
    unnamed = importlib.import_module("theirs_unnamed").make(file)
    assert read_by_toolkit(rows) == {str(file)}
    assert read_by_toolkit(unnamed) == set()
    torch.save({"w": torch.ones(1)}, tmp_path / "w.pt")
    resolve("torch.nn:Linear")
    assert read_by_toolkit(rows, partial(torch.load, tmp_path / "w.pt")) == {str(file)}


def read_by_toolkit(rows, also=dict) -> set[str]:
    """Return what is recorded of a thread in which no code of a user is on the stack."""
    with recording() as found, ThreadPoolExecutor(1) as pool:
        assert pool.submit(itemgetter(1), rows).result() == 1
        pool.submit(also).result()
    return found.files


def read_by_library(file: Path) -> None:
    assert load_file(file)["w"].sum() == 3


def read_piece_by_piece(file: Path) -> None:
    with safetensors.safe_open(file, framework="pt") as opened:
        assert opened.get_tensor("w").sum() == 3


def read_as_bytes(file: Path) -> None:
    assert len(torch.from_file(str(file), size=4, dtype=torch.uint8)) == 4


NATIVE = [read_by_library, read_piece_by_piece, read_as_bytes]


@pytest.mark.parametrize("read", NATIVE)
def test_files_count_that_a_library_opens_outside_of_python(tmp_path: Path, read) -> None:
    file = tmp_path / "w.safetensors"
    save_file({"w": torch.ones(3)}, file)
    with recording() as found:
        read(file)
    assert found.files == {str(file)}
    assert not isinstance(3, safetensors.safe_open)


PARQUET = """
import ctypes, os
class ParquetFile:
    def __init__(self, source):
        descriptor = ctypes.CDLL(None).open(os.fsencode(source), os.O_RDONLY)
        assert os.close(descriptor) is None
def read_table(source, columns=None):
    return columns
"""


def test_readers_are_noted_whenever_they_are_imported(tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "site-packages" / "pyarrow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "parquet.py").write_text(PARQUET)
    tables = tmp_path / "tables"
    tables.mkdir()
    for name in ("a", "b", "c"):
        (tables / name).write_text("")
    monkeypatch.syspath_prepend(package.parent)
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with recording() as found:
        parquet = importlib.import_module("pyarrow.parquet")
        parquet.ParquetFile(tables / "a")
        assert parquet.read_table(source=str(tables / "b"), columns=["c"]) == ["c"]
    assert found.files == {str(tables / "a"), str(tables / "b")}
    with recording() as found:
        parquet.read_table(tables)
    assert found.files == {str(tables / name) for name in "abc"}
    for name in ("pyarrow", "pyarrow.parquet"):  # not by monkeypatch, which would bring it back
        sys.modules.pop(name, None)


class Lazy(Dataset):
    def __init__(self, file: Path, count: int) -> None:
        self.file, self.count = file, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((2,), float(index)), int(np.load(self.file)[index])


@pytest.fixture
def labels(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr(fingerprint, "SAMPLED_FOR_FINGERPRINT", 8)
    np.save(tmp_path / "labels.npy", np.zeros(90, np.int64))
    return tmp_path / "labels.npy"


def relabel(file: Path, index: int) -> None:
    values = np.load(file)
    values[index] += 1
    np.save(file, values)


@pytest.mark.parametrize("workers", [0, 2])
def test_val_is_hashed_whole_and_what_a_sampled_split_opens_is_followed(labels, workers) -> None:
    def splits() -> Splits:
        names = ("train", "val", "test")
        return Splits({n: Lazy(labels, 90) for n in names}, 32, Loading(workers=workers))

    before, data = splits().contents(), splits()
    assert before.sampled == ["train"]
    assert before.counts == {"train": 8, "val": 90, "test": 90}
    assert data.contents().fingerprint == before.fingerprint
    assert data.recorded_reads().files == {str(labels)}
    relabel(labels, 1)
    now = splits().contents().parts["splits"]
    changed = [name for name, part in now.items() if part != before.parts["splits"][name]]
    assert changed == ["test", "val"]
    assert data.contents().fingerprint == before.fingerprint, "read once a run"


def test_the_calibration_sample_is_hashed_whole(labels: Path) -> None:
    def digest(samples: int, seed: int, split: str = "train") -> str | None:
        return Splits({split: Lazy(labels, 90)}).calibration_digest(samples, seed)

    data = Splits({"train": Lazy(labels, 90)})
    one, other = (
        [int(x) for batch in data.calibration(5, seed) for x in batch.inputs[0][:, 0]]
        for seed in (0, 1)
    )
    index = next(i for i in one if i not in other and i % 12)
    before = [digest(5, 0), digest(5, 1)]
    assert before[0] != before[1]
    relabel(labels, index)
    assert [digest(5, 0) == before[0], digest(5, 1) == before[1]] == [False, True]
    assert digest(5, 0, "calibration") is None, "that split is hashed whole anyway"


def test_a_cache_of_samples_is_another_one_for_another_file_of_labels(tmp_path, labels) -> None:
    (tmp_path / "cached_of_ours.py").write_text(
        "import numpy as np, pathlib, torch\n"
        "from torch.utils.data import Dataset\n\n"
        "class Rows(Dataset):\n"
        "    def __init__(self):\n"
        "        self.y = np.load(pathlib.Path(__file__).parent / 'labels.npy')\n"
        "    def __len__(self):\n"
        "        return 90\n"
        "    def __getitem__(self, index):\n"
        "        return torch.zeros(2), int(self.y[index])\n\n"
        "def data():\n"
        "    return {'val': Rows()}\n"
    )
    loading = Loading(cache=str(tmp_path / "cache"))

    def targets() -> torch.Tensor:
        splits = DataReference("cached_of_ours:data", {}, tmp_path, 90, loading).load()
        assert splits.contents().cached == {"val"}
        return next(splits.batches("val")).target

    assert targets().sum() == 0
    relabel(labels, 1)  # none of the eight that are read anew
    assert targets().sum() == 1


def test_a_metric_that_is_evaluated_once_counts_for_all_who_ask(mlp, blobs, tmp_path) -> None:
    (tmp_path / "metrics_of_ours.py").write_text(
        "from pathlib import Path\n\n"
        "def weighted(outputs, targets):\n"
        "    return float((Path(__file__).parent / 'weight.txt').read_text())\n"
    )
    (tmp_path / "weight.txt").write_text("0.5")
    metric = Metric("metrics_of_ours:weighted", direction=True, folder=tmp_path)
    context = Context(root=tmp_path / "none", data=blobs, metric=metric)
    for _ in range(2):
        with recording() as found:
            assert context.score(mlp) == 0.5
        assert str(tmp_path / "weight.txt") in found.files
