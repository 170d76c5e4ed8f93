import json
import sys
from pathlib import Path

import pytest

from compress.core.artifact import Artifact
from compress.core.eager import EagerModel
from compress.core.errors import ArtifactInvalid, PipelineInvalid
from compress.core.graph import GraphModel


def _edit(file: Path, content: bytes) -> None:
    file.chmod(0o644)
    file.write_bytes(content)


def test_reads_back_as_the_kind_it_is(mlp: EagerModel) -> None:
    found = Artifact.at(mlp.path)
    assert type(found) is EagerModel
    assert found.digest == mlp.digest
    found.verify()


def test_refuses_another_kind(mlp: EagerModel) -> None:
    with pytest.raises(ArtifactInvalid, match="is 'eager', expected graph"):
        GraphModel.at(mlp.path)


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
    with pytest.raises(RuntimeError), EagerModel.sealing(tmp_path / "new", mlp.signature) as folder:
        (folder / "weights.safetensors").write_bytes(b"half")
        raise RuntimeError
    assert not (tmp_path / "new").exists()
    assert not [p for p in tmp_path.iterdir() if "partial" in p.name]


def test_a_failed_write_keeps_what_was_there(mlp: EagerModel) -> None:
    with pytest.raises(RuntimeError), EagerModel.sealing(mlp.path, mlp.signature):
        raise RuntimeError
    Artifact.at(mlp.path).verify()


def test_a_directory_without_manifest_is_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactInvalid, match="not an artifact"):
        Artifact.at(tmp_path)


def test_an_unreadable_manifest_names_the_key(mlp: EagerModel) -> None:
    manifest = mlp.path / "manifest.json"
    _edit(manifest, manifest.read_bytes().replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(ArtifactInvalid, match="version"):
        Artifact.at(mlp.path)


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
    mlp.load()
    assert not ran.exists()
    with pytest.raises(ArtifactInvalid, match=r"__pycache__.* was added"):
        mlp.verify()


def test_a_manifest_without_payload_is_no_artifact(mlp: EagerModel) -> None:
    manifest = mlp.path / "manifest.json"
    content = json.loads(manifest.read_text())
    _edit(manifest, json.dumps({**content, "files": {}}).encode())
    with pytest.raises(ArtifactInvalid, match=r"weights\.safetensors is not among them"):
        Artifact.at(mlp.path)
