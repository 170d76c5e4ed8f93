import json
import os
import pickle
import shutil
import weakref
from enum import Enum
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.checkpoint import state_dict
from compress.checkpoint.loading import checkpoint_digest, read_state_dict
from compress.checkpoint.state_dict import StoredTensor, load_state_
from compress.common.errors import ArtifactInvalid
from compress.common.signature import Signature, TensorSpec

HERE = Path(__file__).parent
SIGNATURE = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))


def _imported(tmp_path: Path, project: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    recipe = Recipe(factory="nets:mlp")
    model = import_checkpoint(
        tmp_path / "in", recipe, SIGNATURE, checkpoint=checkpoint, folder=project
    )
    return model.load().state_dict()


def _equal(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, launch) -> Path:
    """Return what two real FSDP2 processes saved: `nested`, `flat` and the same, `whole.pt`."""
    folder = tmp_path_factory.mktemp("saved")
    launch(HERE / "save_sharded_here.py", 2, folder)
    return folder


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    """Return a copy of `nested` that may be damaged."""
    return Path(shutil.copytree(saved / "nested", tmp_path / "sharded"))


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["nested", "flat"])
def test_what_two_fsdp_processes_saved_is_imported_equal(tmp_path, project, saved, name) -> None:
    assert len(list((saved / name).glob("*.distcp"))) == 2
    expected = torch.load(saved / "whole.pt", weights_only=True)
    assert _equal(_imported(tmp_path, project, saved / name), expected)


class _PicklerOfPython3112(pickle.Pickler):
    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


@pytest.mark.multiprocess
def test_an_index_that_python_3_11_2_wrote_is_read(tmp_path, project, saved, sharded) -> None:
    file = sharded / ".metadata"
    content = pickle.loads(file.read_bytes())
    with file.open("wb") as stream:
        _PicklerOfPython3112(stream).dump(content)
    assert b"getattr" in file.read_bytes()
    expected = torch.load(saved / "whole.pt", weights_only=True)
    assert _equal(_imported(tmp_path, project, sharded), expected)


class _Planted:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.multiprocess
@pytest.mark.parametrize("place", ["whole", "planner_data", "storage_data"])
def test_planted_code_in_the_metadata_is_never_executed(tmp_path, sharded, place) -> None:
    trace, file = tmp_path / "executed", sharded / ".metadata"
    planted = _Planted(f"touch {trace}")
    content = pickle.loads(file.read_bytes())
    if place == "whole":
        content = planted
    else:
        getattr(content, place)["planted"] = planted
    file.write_bytes(pickle.dumps(content))
    with pytest.raises(ArtifactInvalid, match=r"names (posix|os)\.system.*never executed"):
        read_state_dict(sharded)
    assert not trace.exists()
    pickle.loads(file.read_bytes())
    assert trace.exists(), "the planted code would not have run anyway"


@pytest.mark.multiprocess
def test_planted_code_in_a_shard_is_never_executed(tmp_path, project, sharded) -> None:
    trace = tmp_path / "executed"
    metadata = pickle.loads((sharded / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == "app.model.0.weight":
            with (sharded / info.relative_path).open("r+b") as stream:
                stream.seek(info.offset)
                stream.write(pickle.dumps(_Planted(f"touch {trace}"), protocol=2))
    with pytest.raises(ArtifactInvalid, match=r"0\.weight cannot be read"):
        _imported(tmp_path, project, sharded)
    assert not trace.exists()


@pytest.mark.multiprocess
def test_a_damaged_directory_is_refused(tmp_path, project, sharded, saved) -> None:
    (sharded / "__1_0.distcp").write_bytes(b"")
    with pytest.raises(ArtifactInvalid, match=r"__1_0\.distcp: app\.model\.0.*truncated"):
        _imported(tmp_path, project, sharded)
    metadata = pickle.loads((saved / "nested" / ".metadata").read_bytes())
    metadata.state_dict_metadata["app.model.0.weight"].chunks.pop()
    (sharded / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ArtifactInvalid, match="32 of 64 entries; a process's part is missing"):
        read_state_dict(sharded)
    (sharded / ".metadata").write_bytes((saved / "nested" / ".metadata").read_bytes()[:-9])
    with pytest.raises(ArtifactInvalid, match="truncated"):
        read_state_dict(sharded)


@pytest.mark.multiprocess
def test_a_file_elsewhere_is_refused(sharded) -> None:
    metadata = pickle.loads((sharded / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (sharded / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ArtifactInvalid, match=r"'\.\./secret', expected a file beside it"):
        read_state_dict(sharded)


def _state() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).state_dict()


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """Return a folder of two safetensors files and their index."""
    folder = tmp_path / "indexed"
    folder.mkdir()
    state = _state()
    places = {
        name: f"model-0000{1 if name[0] == '0' else 2}-of-00002.safetensors" for name in state
    }
    for file in set(places.values()):
        save_file({n: t for n, t in state.items() if places[n] == file}, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_several_safetensors_files_are_imported_equal(tmp_path, project, indexed, name) -> None:
    assert _equal(_imported(tmp_path, project, indexed / name), _state())


def test_a_folder_with_one_safetensors_file_is_imported(tmp_path, project) -> None:
    (tmp_path / "folder").mkdir()
    save_file(_state(), tmp_path / "folder" / "model.safetensors")
    assert _equal(_imported(tmp_path, project, tmp_path / "folder"), _state())


def test_a_damaged_index_is_refused(indexed) -> None:
    index = indexed / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    (indexed / "model-00002-of-00002.safetensors").rename(indexed / "other.safetensors")
    with pytest.raises(ArtifactInvalid, match="model-00002-of-00002"):
        read_state_dict(index)
    good["weight_map"]["2.bias"] = "model-00001-of-00002.safetensors"
    good["weight_map"]["2.weight"] = "other.safetensors"
    index.write_text(json.dumps(good))
    with pytest.raises(ArtifactInvalid, match=r"2\.bias is not in model-00001"):
        read_state_dict(index)
    good["weight_map"]["2.bias"] = "/etc/passwd"
    index.write_text(json.dumps(good))
    with pytest.raises(ArtifactInvalid, match="'/etc/passwd', expected a file beside it"):
        read_state_dict(index)
    index.write_text("{")
    with pytest.raises(ArtifactInvalid, match="not a readable index"):
        read_state_dict(index)


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "a" * 256, "", ".", "../x", "a\\b"])
def test_what_no_file_can_be_called_is_one_line(indexed, name) -> None:
    index = indexed / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ArtifactInvalid, match="expected a file beside it"):
        read_state_dict(index)


def test_an_older_hugging_face_folder_is_read(tmp_path) -> None:
    torch.save(_state(), tmp_path / "pytorch_model.bin")
    read = read_state_dict(tmp_path)
    assert all(torch.equal(read[name], tensor) for name, tensor in _state().items())


def test_another_folder_is_refused(tmp_path) -> None:
    with pytest.raises(ArtifactInvalid, match=r"a directory without \.metadata"):
        read_state_dict(tmp_path)


def test_the_digest_follows_every_file(indexed) -> None:
    index = indexed / "model.safetensors.index.json"
    before = checkpoint_digest(index)
    assert before == checkpoint_digest(index) == checkpoint_digest(indexed)
    shard = indexed / "model-00002-of-00002.safetensors"
    save_file({n: t + 1 for n, t in _state().items() if n[0] == "2"}, shard)
    assert checkpoint_digest(index) != before
    assert checkpoint_digest(indexed / "absent") is None


def test_tensors_are_read_one_after_the_other(monkeypatch) -> None:
    monkeypatch.setattr(state_dict, "BYTES_AT_ONCE", 16)
    state, alive, most = _state(), weakref.WeakSet(), 0

    def stored(tensor: torch.Tensor) -> StoredTensor:
        def read() -> torch.Tensor:
            nonlocal most
            copy = tensor.clone()
            alive.add(copy)
            most = max(most, len(alive))
            return copy

        return StoredTensor(tuple(tensor.shape), tensor.dtype, read)

    module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    load_state_(module, {n: stored(t) for n, t in state.items()}, "here")
    assert _equal(module.state_dict(), state)
    assert most == 1


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight


def test_a_tied_weight_may_be_there_once() -> None:
    module, weight = Tied(), torch.randn(8, 4)
    load_state_(module, {"embedding.weight": weight}, "here")
    assert torch.equal(module.head.weight, weight)
    with pytest.raises(ArtifactInvalid, match=r"missing embedding\.weight, head\.weight"):
        load_state_(module, {}, "here")
