"""Packing: what is in a .mar, that it is the same every time, and what is refused."""

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from compress.artifacts.artifact import Artifact
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.common.errors import ArtifactInvalid, GateRefused, StageFailed, Unavailable
from compress.common.sealed_json import load_sealed
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.core.context import Context
from compress.core.gates import MaxSize
from compress.data.splits import Splits
from compress.export.onnx.stage import ExportOnnx, OnnxModel
from compress.export.torchscript.stage import ExportTorchScript
from compress.serve.packaging.model_interface import rows_stay_first
from compress.serve.packaging.provenance import Provenance
from compress.serve.torchserve.artifact import TorchServeArchive
from compress.serve.torchserve.mar_file import (
    check_member_name,
    handler_text,
    mar_manifest,
    read_mar,
    write_mar,
)
from compress.serve.torchserve.stage import PackageTorchServe
from compress.serve.verify import verify
from compress.serve.worker.wire import from_npz

pytestmark = pytest.mark.torchserve


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> OnnxModel:
    folder = tmp_path_factory.mktemp("exported")
    (folder / "perceptron.py").write_text(
        "from torch import nn\n\ndef mlp():\n"
        "    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))\n"
    )
    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 4)),), outputs=(OutputSpec(name="logits"),)
    )
    recipe = Recipe(factory="perceptron:mlp")
    source = import_checkpoint(folder / "source", recipe, signature, checkpoint=None, folder=folder)
    return ExportOnnx().run_checked(source, Context(root=folder / "onnx"))


@pytest.fixture
def model(exported: OnnxModel, tmp_path: Path) -> OnnxModel:
    """Return a copy that a test may damage."""
    return OnnxModel.from_directory(shutil.copytree(exported.path, tmp_path / "onnx"))


@pytest.fixture
def archive(model: OnnxModel, blobs: Splits, tmp_path: Path) -> TorchServeArchive:
    return PackageTorchServe().run(model, Context(root=tmp_path / "mar", data=blobs))


@pytest.mark.slow
def test_two_folders_give_the_same_bytes(
    archive: TorchServeArchive, model: OnnxModel, blobs: Splits, tmp_path: Path
) -> None:
    moved = shutil.copytree(model.path, tmp_path / "elsewhere" / "model")
    twin = PackageTorchServe().run(
        Artifact.from_directory(moved), Context(root=tmp_path / "b" / "twin", data=blobs)
    )
    assert twin.payload_path.read_bytes() == archive.payload_path.read_bytes()
    assert twin.digest == archive.digest
    renamed = PackageTorchServe(model_name="other").run(
        model, Context(root=tmp_path / "renamed", data=blobs)
    )
    assert renamed.payload_path.read_bytes() != archive.payload_path.read_bytes()


def test_torchserve_finds_what_it_reads(archive: TorchServeArchive, model: OnnxModel) -> None:
    members = read_mar(archive.payload_path)
    manifest = json.loads(members["MAR-INF/MANIFEST.json"])
    # The keys that torch-model-archiver 0.12.0 writes.
    assert sorted(manifest) == ["archiverVersion", "createdOn", "model", "runtime"]
    assert manifest["runtime"] == "python"
    assert manifest["model"]["modelName"] == "model"
    for key in ("serializedFile", "handler", "configFile"):
        assert manifest["model"][key] in members
    assert members["model.onnx"] == model.payload_path.read_bytes()
    assert members["handler.py"] == handler_text()
    with zipfile.ZipFile(archive.payload_path) as stored:
        assert stored.testzip() is None
        assert stored.namelist() == sorted(stored.namelist())
        assert {entry.date_time[0] for entry in stored.infolist()} == {1980}


def test_settings_reach_torchserve_as_numbers(
    model: OnnxModel, blobs: Splits, tmp_path: Path
) -> None:
    stage = PackageTorchServe(workers=2, batch_size=8, max_batch_delay_ms=3, probe_atol=1e-5)
    archive = stage.run(model, Context(root=tmp_path / "mar", data=blobs))
    config = yaml.safe_load(read_mar(archive.payload_path)["model-config.yaml"])
    assert (config["minWorkers"], config["maxWorkers"]) == (2, 2)
    assert (config["batchSize"], config["maxBatchDelay"]) == (8, 3)
    assert config["handler"]["probe_atol"] == 1e-5
    assert config["handler"]["joins_rows"] is True
    assert config["handler"]["inputs"] == [{"name": "x", "shape": ["batch", 4], "dtype": "float32"}]


def test_the_probe_holds_samples_spread_over_val_and_the_models_answers(
    archive: TorchServeArchive, model: OnnxModel, blobs: Splits
) -> None:
    probe = from_npz(read_mar(archive.payload_path)["probe.npz"])
    first = next(iter(blobs.batches("val", batch_size=4, limit=4))).inputs[0]
    assert np.array_equal(probe["x"], first.numpy())
    with model.open() as predict:
        assert np.array_equal(probe["logits"], predict(first)[0].numpy())


STACKED = """
from torch import nn

class Stacked(nn.Module):
    # The state as torch's recurrent layers give it: layers first, rows second.

    def __init__(self, layers):
        super().__init__()
        self.layer = nn.Linear(3, 5)
        self.layers = layers

    def forward(self, x):
        y = self.layer(x)
        return y, y[:, -1].expand(self.layers, -1, -1)
"""


@pytest.mark.parametrize(("layers", "rows"), [(1, 1), (4, 4), (2, 4)])
def test_rows_are_not_joined_where_an_output_has_them_on_another_axis(
    tmp_path: Path, layers: int, rows: int
) -> None:
    (tmp_path / "stacked.py").write_text(STACKED)
    signature = Signature(
        inputs=(TensorSpec(name="x", shape=("batch", 6, 3)),),
        outputs=(OutputSpec(name="y"), OutputSpec(name="state")),
    )
    recipe = Recipe(factory="stacked:Stacked", arguments={"layers": layers})
    source = import_checkpoint(
        tmp_path / "source", recipe, signature, checkpoint=None, folder=tmp_path
    )
    model = ExportTorchScript().run_checked(source, Context(root=tmp_path / "ts"))
    archive = PackageTorchServe(max_rows=rows).run(model, Context(root=tmp_path / "mar"))
    members = read_mar(archive.payload_path)
    assert from_npz(members["probe.npz"])["state"].shape == (layers, rows, 5)
    assert yaml.safe_load(members["model-config.yaml"])["handler"]["joins_rows"] is False


def test_rows_are_joined_only_where_the_batch_is_dynamic_and_any_size_is_taken() -> None:
    def twice(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (inputs[0] * 2,)

    def at_least_two(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert len(inputs[0]) > 1
        return twice(*inputs)

    def signature(*shapes: tuple[int | str, ...]) -> Signature:
        specs = [{"name": f"x{i}", "shape": shape} for i, shape in enumerate(shapes)]
        return Signature.model_validate({"inputs": specs})

    x = (torch.ones(2, 3),)
    dynamic = signature(("batch", 3))
    assert rows_stay_first(twice, dynamic, x, twice(*x))
    assert not rows_stay_first(at_least_two, dynamic, x, twice(*x))
    assert not rows_stay_first(twice, signature((2, 3)), x, twice(*x))
    assert not rows_stay_first(twice, signature(("batch", 3), ("other", 3)), (*x, *x), twice(*x))


def test_the_manifest_says_where_it_comes_from(
    archive: TorchServeArchive, model: OnnxModel
) -> None:
    assert archive.manifest.lineage[-1].inputs == {"input": model.digest}
    assert archive.manifest.facts["packaged"] == {"kind": "onnx", "digest": model.digest}
    assert archive.parameters() == model.parameters() == 131
    assert archive.macs() == model.macs()
    provenance = json.loads(read_mar(archive.payload_path)["provenance.json"])
    assert provenance["artifact"]["digest"] == model.digest
    assert str(model.path) not in json.dumps(provenance)


def test_it_reads_back_in_a_fresh_process_without_torch(
    archive: TorchServeArchive, fresh_process: Callable[[str], str]
) -> None:
    code = (
        "import sys; from compress.serve.torchserve.stage import PackageTorchServe; "
        "from compress.artifacts.artifact import Artifact; "
        f"archive = Artifact.from_directory({str(archive.path)!r}); "
        "print(archive.digest, PackageTorchServe().gates[1].atol); "
        "print({'torch', 'onnx', 'onnxruntime', 'ts'} & set(sys.modules))"
    )
    assert fresh_process(code) == f"{archive.digest} 0.0001\nset()"


def test_without_java_nothing_is_written(
    model: OnnxModel, tmp_path: Path, hide_java: Callable[[], None]
) -> None:
    hide_java()
    with pytest.raises(Unavailable, match="needs java, which is not installed; Java 17"):
        PackageTorchServe()(model, Context(root=tmp_path / "mar"))
    assert not (tmp_path / "mar").exists()
    assert [r.what for r in PackageTorchServe.requirements if r.missing()] == ["java"]


def test_without_torchserve_nothing_is_written(
    model: OnnxModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip install -e '\.\[serve\]'"):
        PackageTorchServe()(model, Context(root=tmp_path / "mar"))
    assert not (tmp_path / "mar").exists()


def test_a_damaged_model_is_not_packed(model: OnnxModel, tmp_path: Path) -> None:
    model.payload_path.chmod(0o644)
    model.payload_path.write_bytes(model.payload_path.read_bytes()[:-1])
    with pytest.raises(ArtifactInvalid, match=r"model\.onnx is not the file that was sealed"):
        PackageTorchServe().run(model, Context(root=tmp_path / "mar"))
    assert not (tmp_path / "mar").exists()


def test_bfloat16_is_refused() -> None:
    from compress.serve.packaging.model_interface import record_probe

    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 3), dtype="bfloat16"),))
    context: Any = SimpleNamespace(data=None, seed=0, threads=1, batch_dependence=lambda _: None)
    model: Any = SimpleNamespace(
        signature=signature, open=lambda *_: nullcontext(lambda x: (x[0],))
    )
    with pytest.raises(StageFailed, match="x is bfloat16"):
        record_probe(model, context, 8)


def test_a_gate_refuses_and_names_what_was_kept(model: OnnxModel, tmp_path: Path) -> None:
    stage = PackageTorchServe(gates=(MaxSize(ratio=0.5),))
    with pytest.raises(GateRefused, match=r"max_size: .*kept in .*mar"):
        stage(model, Context(root=tmp_path / "mar"))
    assert TorchServeArchive.from_directory(tmp_path / "mar").payload_bytes > model.payload_bytes


def test_an_altered_mar_is_not_started(archive: TorchServeArchive) -> None:
    members = read_mar(archive.payload_path)
    archive.payload_path.chmod(0o644)
    write_mar(archive.payload_path, members | {"handler.py": b"print('mine')\n"})
    with (
        pytest.raises(ArtifactInvalid, match=r"handler\.py is not the file that was packed"),
        archive.open(),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../handler.py", "plain relative path"),
        ("/etc/passwd", "plain relative path"),
        ("a\\b", "plain relative path"),
        ("a//b", "plain relative path"),
        ("onnxruntime.py", "shadow"),
        ("numpy/__init__.py", "shadow"),
        ("torch.so", "shadow"),
        ("json.pyc", "shadow"),
    ],
)
def test_unsafe_member_names_are_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ArtifactInvalid, match=words):
        write_mar(tmp_path / "x.mar", {name: b""})
    assert not (tmp_path / "x.mar").exists()
    with zipfile.ZipFile(tmp_path / "y.mar", "w") as archive:
        archive.writestr(name, b"")
    with pytest.raises(ArtifactInvalid, match=words):
        read_mar(tmp_path / "y.mar")


def test_a_compressed_member_is_not_unfolded(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.mar", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.onnx", bytes(1000))
    with pytest.raises(ArtifactInvalid, match=r"member model\.onnx is compressed"):
        read_mar(tmp_path / "x.mar")


def test_ordinary_member_names_are_accepted() -> None:
    for name in ("handler.py", "model.onnx", "MAR-INF/MANIFEST.json", "model.python"):
        check_member_name(name)


def altered(archive: TorchServeArchive, target: Path, **changes: bytes | None) -> Path:
    members = {**read_mar(archive.payload_path)}
    for key, content in changes.items():
        name = {"handler": "handler.py", "model": "model.onnx", "probe": "probe.npz"}[key]
        members.pop(name)
        if content is not None:
            members[name] = content
    write_mar(target, members)
    return target


def test_an_altered_member_is_named(archive: TorchServeArchive, tmp_path: Path) -> None:
    for key, words in (("model", "model.onnx is not"), ("handler", "handler.py is not")):
        with pytest.raises(ArtifactInvalid, match=words):
            verify(altered(archive, tmp_path / "a.mar", **{key: b"other"}))
    with pytest.raises(ArtifactInvalid, match=r"probe\.npz is missing"):
        verify(altered(archive, tmp_path / "b.mar", probe=None))
    added = {**read_mar(archive.payload_path), "extra.txt": b""}
    write_mar(tmp_path / "c.mar", added)
    with pytest.raises(ArtifactInvalid, match=r"extra\.txt was added"):
        verify(tmp_path / "c.mar")
    (tmp_path / "d.mar").write_bytes(archive.payload_path.read_bytes()[:2000])
    with pytest.raises(ArtifactInvalid, match=r"not a readable \.mar"):
        verify(tmp_path / "d.mar")
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "manifest.json").write_bytes((archive.path / "manifest.json").read_bytes())
    altered(archive, folder / "model.mar", model=b"other")
    with pytest.raises(ArtifactInvalid, match=r"model\.mar is not the file that was sealed"):
        verify(folder)


def test_other_artifacts_are_verified_by_their_hashes(model: OnnxModel) -> None:
    lines = verify(model.path).proven
    assert lines[0] == f"onnx artifact, digest {model.digest}"
    assert any(line.startswith("model.onnx: ") for line in lines)
    assert lines[-1].startswith("export_onnx read input ")


FOREIGN = {
    "handler.py": b"raise SystemExit('ran')\n",
    "MAR-INF/MANIFEST.json": mar_manifest("model", "other.onnx"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_code_is_not_run_however_consistent_its_hashes(
    archive: TorchServeArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def digest_of(data: bytes) -> dict[str, str | int]:
        return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}

    monkeypatch.setattr(
        "compress.serve.torchserve.process.TorchServe.__enter__",
        lambda server: pytest.fail("started"),
    )
    members = read_mar(archive.payload_path)
    provenance = load_sealed(members["provenance.json"])
    provenance["members"][name] = digest_of(FOREIGN[name])
    sealed = Provenance.model_validate(provenance).sealed()
    members |= {name: FOREIGN[name], "provenance.json": sealed}
    folder = tmp_path / "artifact"
    folder.mkdir()
    write_mar(folder / "model.mar", members)
    manifest = load_sealed((archive.path / "manifest.json").read_bytes())
    manifest["facts"]["provenance"] = digest_of(sealed)["sha256"]
    manifest["files"]["model.mar"] = digest_of((folder / "model.mar").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for path in (folder / "model.mar", folder):
        with pytest.raises(ArtifactInvalid, match=f"{name} is not the one that this version"):
            verify(path)


@pytest.mark.slow
def test_a_mar_without_its_directory_is_verified(archive: TorchServeArchive) -> None:
    lines = verify(archive.payload_path).proven
    assert archive.manifest.files["model.mar"].sha256 in lines[0]
    assert "largest difference" in lines[-1]


@pytest.mark.slow
def test_verifying_replays_the_probe_in_a_fresh_process(
    archive: TorchServeArchive, fresh_process: Callable[[str], str]
) -> None:
    code = (
        "from compress.serve.verify import verify\n"
        f"print(*verify({str(archive.path)!r}).proven, sep='\\n')"
    )
    lines = fresh_process(code).splitlines()
    assert lines[0] == f"torchserve artifact, digest {archive.digest}"
    assert "7 members have safe names; 6 hash to what provenance.json records" in lines
    assert lines[-1].startswith("TorchServe answered the recorded probe (4 samples); largest")


def test_the_memory_of_the_server_is_not_taken_for_that_of_a_call(
    archive: TorchServeArchive,
) -> None:
    with pytest.raises(StageFailed, match="TorchServe runs the model in processes of its own"):
        Context(root=archive.path).peak_memory(archive, batch=1)
