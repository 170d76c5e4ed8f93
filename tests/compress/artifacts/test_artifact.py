import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.artifacts.artifact import Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.sealed_json import dump_sealed, load_sealed
from compress.core.context import Context
from compress.export.onnx.stage import ExportOnnx


def _edit(file: Path, content: bytes) -> None:
    file.chmod(0o644)
    file.write_bytes(content)


def test_reads_back_as_the_kind_it_is(mlp: EagerModel) -> None:
    found = Artifact.from_directory(mlp.path)
    assert type(found) is EagerModel
    assert found.digest == mlp.digest
    found.verify()


@pytest.mark.slow
def test_opens_every_kind_in_a_fresh_process(
    mlp: EagerModel, tmp_path: Path, fresh_torch: Callable[[str], str]
) -> None:
    path = str(ExportOnnx().run(mlp, Context(root=tmp_path / "onnx")).path)
    code = f"import compress; print(type(compress.Artifact.from_directory({path!r})).__name__)"
    assert fresh_torch(code) == "OnnxModel"


def test_refuses_another_kind(mlp: EagerModel) -> None:
    with pytest.raises(ArtifactInvalid, match="is 'eager', expected graph"):
        GraphModel.from_directory(mlp.path)


@pytest.mark.parametrize("file", ["weights.safetensors", "code/nets.py"])
def test_verify_names_the_altered_file(mlp: EagerModel, file: str) -> None:
    original = (mlp.path / file).read_bytes()
    _edit(mlp.path / file, original[:-1] + bytes([original[-1] ^ 1]))
    with pytest.raises(ArtifactInvalid, match=f"{file} is not the file that was sealed"):
        mlp.verify()


def test_verify_names_missing_and_added_files(mlp: EagerModel) -> None:
    (mlp.path / "extra.bin").write_bytes(b"x")
    with pytest.raises(ArtifactInvalid, match=r"extra\.bin was added"):
        mlp.verify()
    (mlp.path / "extra.bin").unlink()
    mlp.payload_path.unlink()
    with pytest.raises(ArtifactInvalid, match=r"weights\.safetensors is missing"):
        mlp.verify()


def test_a_failed_write_leaves_nothing(mlp: EagerModel, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError),
        EagerModel.atomic_write(tmp_path / "new", mlp.signature) as folder,
    ):
        (folder / "weights.safetensors").write_bytes(b"half")
        raise RuntimeError
    assert not (tmp_path / "new").exists()
    assert not [p for p in tmp_path.iterdir() if "partial" in p.name]


def test_a_failed_write_keeps_what_was_there(mlp: EagerModel) -> None:
    with pytest.raises(RuntimeError), EagerModel.atomic_write(mlp.path, mlp.signature):
        raise RuntimeError
    Artifact.from_directory(mlp.path).verify()


def test_a_directory_without_manifest_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactInvalid, match=r"not an artifact \(it has no manifest.json\)$"):
        Artifact.from_directory(tmp_path)
    (tmp_path / "artifacts" / "onnx").mkdir(parents=True)
    (tmp_path / "artifacts" / "onnx" / "manifest.json").touch()
    with pytest.raises(ArtifactInvalid, match=r"name one of those in it: .*/artifacts/onnx$"):
        Artifact.from_directory(tmp_path)


def test_an_unreadable_manifest_names_the_key(mlp: EagerModel) -> None:
    manifest = mlp.path / "manifest.json"
    content = load_sealed(manifest.read_bytes())
    _edit(manifest, dump_sealed({**content, "version": 2}))
    with pytest.raises(ArtifactInvalid, match="version"):
        Artifact.from_directory(mlp.path)


def test_other_files_are_never_overwritten(mlp: EagerModel, tmp_path: Path) -> None:
    precious = tmp_path / "mine" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    with pytest.raises(PipelineInvalid, match="would be lost"):
        mlp.derive(precious.parent, mlp.load())
    assert precious.read_text() == "years of work"


def test_planted_bytecode_is_named_and_never_run(mlp: EagerModel, tmp_path: Path) -> None:
    import py_compile

    evil, ran = tmp_path / "evil.py", tmp_path / "ran"
    evil.write_text(f"open({str(ran)!r}, 'w').close()\nfrom torch import nn\nmlp = nn.Linear\n")
    cached = mlp.path / "code" / "__pycache__" / f"nets.{sys.implementation.cache_tag}.pyc"
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(evil), cfile=str(cached), invalidation_mode=mode)
    for refuse in (mlp.load, mlp.verify):
        with pytest.raises(ArtifactInvalid, match=r"__pycache__.* was added"):
            refuse()
    assert not ran.exists()


def test_a_manifest_without_payload_is_no_artifact(mlp: EagerModel) -> None:
    manifest = mlp.path / "manifest.json"
    content = load_sealed(manifest.read_bytes())
    _edit(manifest, json.dumps({**content, "files": {}}).encode())
    with pytest.raises(ArtifactInvalid, match=r"weights\.safetensors is not among them"):
        Artifact.from_directory(mlp.path)


def _planted_as_folder(model: EagerModel, elsewhere: Path) -> None:
    shutil.rmtree(model.path / "code")
    (model.path / "code").symlink_to(elsewhere)


def _planted_as_file(model: EagerModel, elsewhere: Path) -> None:
    (model.path / "code" / "nets.py").unlink()
    (model.path / "code" / "nets.py").symlink_to(elsewhere / "nets.py")


def _planted_beside(model: EagerModel, elsewhere: Path) -> None:
    (model.path / "code" / "more").symlink_to(elsewhere)


def _manifest_elsewhere(model: EagerModel, elsewhere: Path) -> None:
    (model.path / "manifest.json").rename(elsewhere / "manifest.json")
    (model.path / "manifest.json").symlink_to(elsewhere / "manifest.json")


def _pipe(model: EagerModel, elsewhere: Path) -> None:
    (model.path / "code" / "nets.py").unlink()
    os.mkfifo(model.path / "code" / "nets.py")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "plant",
    [_planted_as_folder, _planted_as_file, _planted_beside, _manifest_elsewhere, _pipe],
)
def test_a_link_or_a_pipe_in_an_artifact_is_refused_and_what_it_leads_to_never_run(
    mlp: EagerModel, tmp_path: Path, plant: Callable[[EagerModel, Path], None]
) -> None:
    elsewhere, ran = tmp_path / "elsewhere", tmp_path / "ran"
    elsewhere.mkdir()
    trace = f"open({str(ran)!r}, 'w').close()\n"
    (elsewhere / "nets.py").write_text(trace + (mlp.path / "code" / "nets.py").read_text())
    plant(mlp, elsewhere)
    refusing: list[Callable[[], object]] = [lambda: EagerModel.from_directory(mlp.path)]
    if plant is not _manifest_elsewhere:
        refusing += [mlp.load, mlp.verify, mlp.skeleton]
    for refuse in refusing:
        with pytest.raises(ArtifactInvalid, match=r"is a (symbolic link|pipe), expected a regular"):
            refuse()
    assert not ran.exists()


def test_changed_code_of_the_same_length_is_never_run(mlp: EagerModel) -> None:
    source = mlp.path / "code" / "nets.py"
    _edit(source, source.read_bytes().replace(b"Linear", b"linear"))
    opened = EagerModel.from_directory(mlp.path)
    with pytest.raises(ArtifactInvalid, match=r"code/nets\.py is not the file that was sealed"):
        opened.load()


def test_a_link_to_an_artifact_is_no_link_in_it(mlp: EagerModel, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(mlp.path)
    opened = EagerModel.from_directory(tmp_path / "latest")
    opened.verify()
    opened.load()


def test_no_byte_of_a_manifest_can_be_changed(mlp: EagerModel) -> None:
    raw = (mlp.path / "manifest.json").read_bytes()
    for place in range(len(raw)):
        changed = raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :]
        with pytest.raises(ArtifactInvalid, match=r"manifest\.json: "):
            Artifact.from_manifest(changed, mlp.path)
    # As earlier versions wrote it.
    assert Artifact.from_manifest(json.dumps(load_sealed(raw)).encode(), mlp.path).digest


def test_a_manifest_with_a_key_twice_is_refused(mlp: EagerModel) -> None:
    manifest = mlp.path / "manifest.json"
    _edit(manifest, manifest.read_bytes().replace(b'"facts": {', b'"kind": "onnx", "facts": {'))
    with pytest.raises(ArtifactInvalid, match="key 'kind' stands twice"):
        EagerModel.from_directory(mlp.path)


def test_changed_weights_are_not_loaded_also_after_they_were_once(mlp: EagerModel) -> None:
    mlp.load()
    original = mlp.payload_path.read_bytes()
    _edit(mlp.payload_path, original[:-1] + bytes([original[-1] ^ 1]))
    for opened in (mlp, EagerModel.from_directory(mlp.path)):
        with pytest.raises(ArtifactInvalid, match=r"weights\.safetensors is not the file that was"):
            opened.load()
    _edit(mlp.payload_path, original)
    mlp.load()
