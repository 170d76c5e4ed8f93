"""Files that a user gives: with planted code, too large unfolded, or reaching outside."""

import io
import json
import os
import pickle
import shutil
import stat
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from compress.artifacts.artifact import MANIFEST, Artifact
from compress.artifacts.hf_folder import refuse_foreign_folder
from compress.checkpoint import safe_zip
from compress.checkpoint.loading import read_state_dict
from compress.common.errors import ArtifactInvalid, CompressError
from compress.common.signature import Signature, TensorSpec
from compress.export.imported.exported_files import digest_of, import_file, signature_of
from compress.pipelines import Pipeline
from compress.pipelines.results.schema import Report
from compress.serve.torchserve.mar_file import MAR_MANIFEST, model_name_of, read_mar
from compress.serve.verify import verify
from compress.serve.worker.wire import from_npz, to_npz


class Planted:
    """A pickle that leaves a folder behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def as_pickle(file: Path, trace: Path) -> None:
    file.write_bytes(pickle.dumps(Planted(trace), protocol=2))


def as_saved_by_torch(file: Path, trace: Path) -> None:
    torch.save({"weight": Planted(trace)}, file)


def as_saved_by_an_old_torch(file: Path, trace: Path) -> None:
    torch.save({"weight": Planted(trace)}, file, _use_new_zipfile_serialization=False)


def as_saved_by_the_oldest_torch(file: Path, trace: Path) -> None:
    content = pickle.dumps(Planted(trace), protocol=2)
    with tarfile.open(file, "w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def as_objects_of_numpy(file: Path, trace: Path) -> None:
    with file.open("wb") as stream:
        np.savez(stream, x=np.array([Planted(trace)], object))


def as_yaml(file: Path, trace: Path) -> None:
    file.write_text(f"!!python/object/apply:os.mkdir [{str(trace)!r}]\n")


def as_mar(file: Path, trace: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(MAR_MANIFEST, json.dumps({"model": {"modelName": "m"}}))
        for name in ("model.pt", "probe.npz", "provenance.json"):
            archive.writestr(name, pickle.dumps(Planted(trace)))


PLANTED = [
    as_pickle,
    as_saved_by_torch,
    as_saved_by_an_old_torch,
    as_saved_by_the_oldest_torch,
    as_objects_of_numpy,
    as_yaml,
    as_mar,
]


def _folder_with(file: Path, name: str) -> Path:
    folder = file.with_name(f"folder of {name}")
    folder.mkdir()
    shutil.copy(file, folder / name)
    return folder


def _a_report(file: Path) -> None:
    folder = _folder_with(file, "report.json")
    shutil.copy(file, folder / "lock.json")
    Report.read(folder)


TAKEN = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
ENTRIES = {
    "checkpoint: model.pt": lambda f: read_state_dict(shutil.copy(f, f.with_suffix(".pt"))),
    "checkpoint: model.bin": lambda f: read_state_dict(shutil.copy(f, f.with_suffix(".bin"))),
    "checkpoint: x.safetensors": lambda f: read_state_dict(
        shutil.copy(f, f.with_suffix(".safetensors"))
    ),
    "checkpoint: an index": lambda f: read_state_dict(
        shutil.copy(f, f.with_suffix(".safetensors.index.json"))
    ),
    "checkpoint: a folder": lambda f: read_state_dict(_folder_with(f, "pytorch_model.bin")),
    "checkpoint: a distributed one": lambda f: read_state_dict(_folder_with(f, ".metadata")),
    "model.file: model.onnx": lambda f: signature_of("onnx", f),
    "model.file: model.pt2": lambda f: signature_of("graph", f),
    "model.file: model.ts": lambda f: import_file("torchscript", f, TAKEN, f.with_name("sealed")),
    "compress run": Pipeline.from_yaml,
    "compress verify": lambda f: verify(shutil.copy(f, f.with_suffix(".mar"))),
    "compress serve": model_name_of,
    "compress inspect": lambda f: Artifact.from_directory(_folder_with(f, MANIFEST)),
    "compress report": _a_report,
    "a request": lambda f: from_npz(f.read_bytes()),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("plant", PLANTED)
def test_code_in_a_file_is_never_run_and_said_in_one_line(tmp_path, entry, plant) -> None:
    file, trace = tmp_path / "given", tmp_path / "trace"
    plant(file, trace)
    if (plant, entry) == (as_mar, "compress serve"):
        assert ENTRIES[entry](file) == "m"  # it reads the name alone
    else:
        with pytest.raises((CompressError, ValueError, zipfile.BadZipFile)) as refused:
            ENTRIES[entry](file)
        assert isinstance(refused.value, CompressError) or entry == "a request"
        assert "\n" not in str(refused.value).strip()
    assert not trace.exists()


def test_what_is_planted_would_run(tmp_path) -> None:
    trace = tmp_path / "trace"
    as_saved_by_torch(tmp_path / "given", trace)
    torch.load(tmp_path / "given", weights_only=False)
    assert trace.exists()


def _zip(file: Path, *names: str) -> zipfile.ZipFile:
    archive = zipfile.ZipFile(file, "w")
    for name in names:
        archive.writestr(name, b"0" * 1000)
    return archive


def _compressed(file: Path, size: int) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"0" * 1000)
        archive.infolist()[0].file_size = size  # what the archive's directory says


def _shared(file: Path) -> None:
    with _zip(file, "archive/data.pkl", "archive/data/0") as archive:
        first, second = archive.infolist()
        second.header_offset = first.header_offset
        second.file_size = second.compress_size = 2**30


def _link(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        info = zipfile.ZipInfo("archive/link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")


def _double(file: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate"):
        _zip(file, "archive/data.pkl", "archive/data.pkl").close()


BOMBS = {
    "far more than itself": (
        lambda f: _compressed(f, safe_zip.UNPACKED_BYTES + 1),
        "compressed and unfolds",
    ),
    "shared bytes": (_shared, "its members share bytes"),
    "a name outside": (lambda f: _zip(f, "../../outside").close(), "not a plain relative path"),
    "an absolute name": (lambda f: _zip(f, "/outside").close(), "not a plain relative path"),
    "a hidden end": (lambda f: _zip(f, "a\\..\\outside").close(), "not a plain relative path"),
    "a link": (_link, "is a link or a device"),
    "a name twice": (_double, "is in the archive twice"),
}
OPENED = {
    "checkpoint": lambda f: read_state_dict(shutil.copy(f, f.with_suffix(".pt"))),
    "model.pt2": lambda f: signature_of("graph", f),
    "model.ts": lambda f: import_file("torchscript", f, TAKEN, f.with_name("sealed")),
    "verify": verify,
    "serve": model_name_of,
}


@pytest.mark.parametrize("opened", OPENED)
@pytest.mark.parametrize("bomb", BOMBS)
def test_an_archive_that_unfolds_elsewhere_or_to_any_size_is_refused(
    tmp_path, opened, bomb
) -> None:
    make, message = BOMBS[bomb]
    make(tmp_path / "given.mar")
    with pytest.raises(ArtifactInvalid, match=message) as refused:
        OPENED[opened](tmp_path / "given.mar")
    assert "\n" not in str(refused.value)
    assert not (tmp_path.parent / "outside").exists()


HIDDEN = {
    "of a later version": lambda content: _patched(content, 6, (99).to_bytes(2, "little")),
    "with names in no alphabet": lambda content: _patched(content, 46, b"\xff"),
    "with a second end": lambda content: content + b"PK\5\6",
}
"""Archives that Python's reader does not list, and PyTorch's may."""


def _patched(content: bytes, offset: int, bytes_: bytes) -> bytes:
    """Overwrite a field of the first member in the archive's directory, its names said UTF-8."""
    start = content.index(b"PK\1\2")
    changed = bytearray(content)
    changed[start + 8 : start + 10] = (0x800).to_bytes(2, "little")
    changed[start + offset : start + offset + len(bytes_)] = bytes_
    return bytes(changed)


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("opened", OPENED)
def test_an_archive_whose_directory_cannot_be_read_is_refused(tmp_path, opened, hidden) -> None:
    given = tmp_path / "given.mar"
    _compressed(given, safe_zip.UNPACKED_BYTES + 1)
    given.write_bytes(HIDDEN[hidden](given.read_bytes()))
    with pytest.raises(ArtifactInvalid, match=r"not a (readable|\.mar)") as refused:
        OPENED[opened](given)
    assert "\n" not in str(refused.value)


def test_what_torch_compresses_itself_is_taken_and_a_mar_may_hold_nothing_so(tmp_path) -> None:
    _compressed(tmp_path / "given", 1000)
    safe_zip.refuse_bomb(tmp_path / "given")
    with pytest.raises(ArtifactInvalid, match="is compressed"):
        read_mar(tmp_path / "given")


def test_an_archive_holds_a_number_of_members(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(safe_zip, "MEMBERS", 2)
    _zip(tmp_path / "given", "a", "b").close()
    safe_zip.refuse_bomb(tmp_path / "given")
    _zip(tmp_path / "given", "a", "b", "c").close()
    with pytest.raises(ArtifactInvalid, match="holds 3 members, more than 2"):
        safe_zip.refuse_bomb(tmp_path / "given")


def test_arrays_of_a_request_that_share_their_bytes_are_refused() -> None:
    stream = io.BytesIO(to_npz({"x": np.ones(9), "y": np.ones(9)}))
    with zipfile.ZipFile(stream, "a") as archive:
        for member in archive.infolist():
            member.file_size = member.compress_size = 2**20
        archive.comment = b"written anew"
    with pytest.raises(ValueError, match="share their bytes"):
        from_npz(stream.getvalue())


@pytest.mark.parametrize("to_module", [False, True])
@pytest.mark.parametrize("location", ["../outside", "/etc/passwd", "link", "missing"])
def test_an_onnx_file_keeps_its_weights_in_its_own_folder(tmp_path, location, to_module) -> None:
    (tmp_path / "outside").write_bytes(b"0" * 4000)
    given = tmp_path / "given"
    given.mkdir()
    (given / "link").symlink_to(tmp_path / "outside")
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [1000], b"0" * 4000, raw=True)
    onnx.external_data_helper.set_external_data(tensor, location)
    tensor.ClearField("raw_data")
    x, y = (onnx.helper.make_tensor_value_info(n, 1, ["n", 1000]) for n in "xy")
    add = onnx.helper.make_node("Add", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([add], "g", [x], [y], [tensor])
    (given / "m.onnx").write_bytes(onnx.helper.make_model(graph).SerializeToString())
    with pytest.raises(ArtifactInvalid) as refused:
        signature = signature_of("onnx", given / "m.onnx")
        path = tmp_path / "sealed"
        import_file("onnx", given / "m.onnx", signature, path, to_module=to_module)
    assert "\n" not in str(refused.value)
    assert str(given) in str(refused.value)
    with pytest.raises(ArtifactInvalid):
        digest_of(given / "m.onnx")  # nor is a link followed for the cache's key


CACHES = {
    "snapshot": Path.symlink_to,
    "hard links": Path.hardlink_to,
    "folder below": lambda place, blob: shutil.copy(blob, place),
}


@pytest.mark.parametrize(
    ("way", "to_module"),
    [
        *((way, False) for way in CACHES),
        ("snapshot", True),
        # A file is read before it is made a module, and the ways are told apart in reading it.
        *(
            pytest.param(way, True, marks=pytest.mark.soak)
            for way in ("hard links", "folder below")
        ),
    ],
)
def test_weights_of_an_onnx_file_lie_where_caches_put_them(tmp_path, way: str, to_module) -> None:
    blobs, given = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "1a2b" / "onnx"
    blobs.mkdir(parents=True)
    given.mkdir(parents=True)
    name = "parts/w.data" if way == "folder below" else "w.data"
    weights = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    tensor = onnx.numpy_helper.from_array(weights, "w")
    onnx.external_data_helper.set_external_data(tensor, name)
    tensor.ClearField("raw_data")
    x, y = (onnx.helper.make_tensor_value_info(n, 1, ["n", 64]) for n in "xy")
    multiply = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    model = onnx.helper.make_model(onnx.helper.make_graph([multiply], "g", [x], [y], [tensor]))
    stored = {"m.onnx": model.SerializeToString(), name: weights.tobytes()}
    for number, (place, content) in enumerate(stored.items()):
        (given / place).parent.mkdir(exist_ok=True)
        (blob := blobs / str(number)).write_bytes(content)
        CACHES[way](given / place, blob)
    file, path = given / "m.onnx", tmp_path / "sealed"
    imported = import_file("onnx", file, signature_of("onnx", file), path, to_module=to_module)
    batch = torch.ones(2, 64)
    with imported.open() as predict:
        torch.testing.assert_close(predict(batch)[0], batch @ torch.from_numpy(weights))
    before = digest_of(file)
    (given / name).write_bytes(b"1" * weights.nbytes)
    assert digest_of(file) != before, "the weights count, too"


def test_weights_of_a_node_may_lie_in_another_file(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    x, y = (onnx.helper.make_tensor_value_info(n, 1, ["n", 64]) for n in "xy")
    constant = onnx.helper.make_node(
        "Constant", [], ["w"], value=onnx.numpy_helper.from_array(weights)
    )
    multiply = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    model = onnx.helper.make_model(onnx.helper.make_graph([constant, multiply], "g", [x], [y]))
    apart = {"save_as_external_data": True, "convert_attribute": True, "size_threshold": 0}
    onnx.save_model(model, file := tmp_path / "m.onnx", **apart, location="w.data")
    imported = import_file("onnx", file, signature_of("onnx", file), tmp_path / "sealed")
    with imported.open() as predict:
        batch = torch.ones(2, 64)
        torch.testing.assert_close(predict(batch)[0], batch @ torch.from_numpy(weights))


YAML_BOMBS = {
    "aliases of aliases": "a0: &a0 [x, x]\n"
    + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(9)),
    "depth": "version: " + "[" * 5_000,
}


@pytest.mark.parametrize("bomb", YAML_BOMBS)
def test_a_pipeline_file_without_end_is_refused(tmp_path, bomb) -> None:
    (tmp_path / "p.yaml").write_text(YAML_BOMBS[bomb])
    with pytest.raises(CompressError, match=r"nested deeper|more than 100000 values") as refused:
        Pipeline.from_yaml(tmp_path / "p.yaml")
    assert "\n" not in str(refused.value)


WITHOUT_END = {
    "checkpoint: model.pt": ("model.pt", read_state_dict),
    "checkpoint: x.safetensors": ("x.safetensors", read_state_dict),
    "checkpoint: an index": ("x.safetensors.index.json", read_state_dict),
    "model.file: model.onnx": ("m.onnx", lambda f: import_file("onnx", f, None, f.parent / "s")),
    "model.file: model.pt2": ("m.pt2", lambda f: import_file("graph", f, None, f.parent / "s")),
    "model.file: model.ts": ("m.ts", lambda f: import_file("torchscript", f, None, f.parent / "s")),
    "model.file, asked what it takes": ("m.onnx", lambda f: signature_of("onnx", f)),
    "huggingface": ("config.json", lambda f: refuse_foreign_folder(f.parent)),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("entry", WITHOUT_END)
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_what_has_no_end_is_refused_and_never_waited_for(tmp_path, entry, kind) -> None:
    name, read = WITHOUT_END[entry]
    if kind == "a pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ArtifactInvalid, match=f"is {kind}, expected a regular file|leads out of"):
        read(tmp_path / name)


@pytest.mark.timeout(60)
def test_a_pipe_that_an_index_names_is_not_waited_for(tmp_path) -> None:
    os.mkfifo(tmp_path / "part.safetensors")
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "part.safetensors"}}))
    with pytest.raises(ArtifactInvalid, match="is a pipe, expected a regular file"):
        read_state_dict(index)


@pytest.mark.parametrize("text", ["hello world\n", "import torch\n", "version: 1\n", "", "{}"])
def test_a_text_as_a_checkpoint_is_said_to_be_unreadable(tmp_path, text) -> None:
    (tmp_path / "model.pt").write_text(text)
    with pytest.raises(ArtifactInvalid, match=r"model\.pt: not a file that torch.save wrote, or"):
        read_state_dict(tmp_path / "model.pt")
