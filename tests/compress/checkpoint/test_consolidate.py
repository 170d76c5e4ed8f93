"""Weights on disk become one safetensors file without ever being whole in memory."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp

from compress import consolidate
from compress.checkpoint import distributed_checkpoint
from compress.checkpoint.loading import read_state_dict
from compress.checkpoint.safetensors_io import DTYPES, write_safetensors
from compress.checkpoint.state_dict import StoredTensor
from compress.common.errors import ArtifactInvalid

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
MEASURE = """
import sys
from pathlib import Path
from compress.checkpoint.loading import consolidate

def kilobytes(key):
    return int(Path("/proc/self/status").read_text().partition(key + ":")[2].split()[0])

folder = Path(sys.argv[1])
consolidate(folder / "warm-up", folder / "warm-up.safetensors")
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = kilobytes("VmRSS")
consolidate(folder / "large", folder / "large.safetensors")
print(1024 * (kilobytes("VmHWM") - before))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory, launch) -> Path:
    """Return where two processes saved `warm-up`."""
    folder = tmp_path_factory.mktemp("saved")
    launch(HERE / "save_large_here.py", 2, folder, "warm-up")
    return folder


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_peak_is_one_tensor_and_a_fifth(saved, launch) -> None:
    launch(HERE / "save_large_here.py", 2, saved, "large")  # tensors of 64 MiB
    command = [sys.executable, "-c", MEASURE, saved]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    largest = max(t.nbytes for t in read_state_dict(saved / "large").values())
    assert largest > 64 * 2**20
    assert 0.9 * largest < int(done.stdout) <= 1.2 * largest
    found = load_file(saved / "large.safetensors")
    expected = [
        torch.empty(4099, 4096).normal_(generator=torch.Generator().manual_seed(seed))
        for seed in range(3)
    ]
    assert torch.equal(found["rows"], expected[0])
    assert torch.equal(found["columns"], expected[1])
    assert torch.equal(found["here"], expected[2].t().half())


@pytest.mark.multiprocess
@pytest.mark.parametrize("bytes_at_once", [8, 30, 1000])
def test_pieces_of_every_size_end_where_they_belong(saved, monkeypatch, bytes_at_once) -> None:
    monkeypatch.setattr(distributed_checkpoint, "BYTES_AT_ONCE", bytes_at_once)
    for name, tensor in read_state_dict(saved / "warm-up").items():
        seed = ("rows", "columns", "here").index(name)
        whole = torch.empty(5, 3).normal_(generator=torch.Generator().manual_seed(seed))
        assert torch.equal(tensor.read(), whole.t().half() if name == "here" else whole)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_every_layout_comes_back(tmp_path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    state = {
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "permuted": base.permute(2, 0, 1),
        "strided": base[:, ::2, 1:],
        "expanded": torch.ones(1, 4).expand(3, 4),
        "later": base.reshape(-1)[5:9],
        "complex": torch.tensor([1 + 2j, 3 - 1j]),
        "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
        "flags": torch.tensor([True, False]),
        "half": base.bfloat16(),
    }
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    consolidate(tmp_path / "saved", tmp_path / "all.safetensors")
    found = load_file(tmp_path / "all.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.multiprocess
@pytest.mark.parametrize("change", ["cut", "shape", "beyond", "dtype"])
def test_what_does_not_fit_its_index_is_refused(tmp_path, saved, change) -> None:
    folder = Path(shutil.copytree(saved / "warm-up", tmp_path / "sharded"))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (entry,) = (e for n, e in metadata.state_dict_metadata.items() if n.endswith("columns"))
    info = next(i for k, i in metadata.storage_data.items() if k.fqn.endswith("columns"))
    if change == "cut":
        info.length -= 40
    elif change == "dtype":
        for info in metadata.storage_data.values():
            info.offset += 1
    else:
        grown = {"shape": (3, 5), "beyond": (5, 4)}[change]
        entry.size = torch.Size(grown) if change == "shape" else entry.size
        entry.chunks = [type(c)(c.offsets, torch.Size(c.sizes)) for c in entry.chunks]
        if change == "beyond":
            first, second = entry.chunks
            entry.chunks = [type(first)(first.offsets, torch.Size((5, 3))), second]
            entry.chunks[1].sizes = torch.Size((5, 0))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ArtifactInvalid, match=r"columns|rows"):
        consolidate(folder, tmp_path / "all.safetensors")
    assert list(tmp_path.glob("*all.safetensors*")) == []


def test_the_bytes_are_those_of_the_safetensors_library(tmp_path) -> None:
    state = {
        f'{code} é"\n': torch.arange(6, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        for code, dtype in DTYPES.items()
        if code != "BOOL"
    }
    state |= {"b": torch.tensor([True]), "a": torch.tensor(False), "empty": torch.empty(2, 0)}
    save_file(state, tmp_path / "theirs", metadata={"format": "pt"})
    write_safetensors(tmp_path / "ours", state)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_tied_tensors_are_written_once_and_always_alike(tmp_path) -> None:
    weight, other = torch.randn(4, 4), torch.randn(3)
    stored = StoredTensor((3,), torch.float32, other.clone)
    state = {"a": weight, "b": weight, "c": weight[:], "x": stored, "y": stored, "z": weight.t()}
    for name in ("one", "two"):
        write_safetensors(tmp_path / name, state)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    with safe_open(tmp_path / "one", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "b": "a", "c": "a", "y": "x"}
        assert sorted(file.keys()) == ["a", "x", "z"]
        assert torch.equal(file.get_tensor("z"), weight.t())


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path) -> None:
    def fail() -> torch.Tensor:
        raise ArtifactInvalid("gone")

    file = tmp_path / "weights.safetensors"
    write_safetensors(file, nn.Linear(2, 2).state_dict())
    before = file.read_bytes()
    lying = StoredTensor((3,), torch.float32, lambda: torch.zeros(4))
    for broken in (StoredTensor((3,), torch.float32, fail), lying):
        with pytest.raises(ArtifactInvalid):
            write_safetensors(file, {"a": torch.ones(2), "b": broken})
    with pytest.raises(ArtifactInvalid, match=r"have no torch\.complex128"):
        write_safetensors(file, {"a": torch.ones(2, dtype=torch.complex128)})
    assert file.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == [file.name]
    assert json.loads(before[8:].partition(b"}}")[0] + b"}}")
