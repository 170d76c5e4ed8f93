"""What a process has written or verified is hashed again only once the file has changed."""

import os
from pathlib import Path

import pytest

from compress.artifacts import artifact as module
from compress.artifacts.eager_model import EagerModel
from compress.common.errors import ArtifactInvalid
from compress.pipelines.store.local import publish, unpublish


@pytest.fixture
def hashed(mlp: EagerModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed once the model was written."""
    names: list[str] = []
    digest = module._digest

    def noting(file: Path) -> module.FileDigest:
        names.append(file.name)
        return digest(file)

    monkeypatch.setattr(module, "_digest", noting)
    return names


def test_what_was_just_written_is_known(mlp: EagerModel, hashed: list[str]) -> None:
    mlp.verify_cached()
    EagerModel.from_directory(mlp.path).verify_cached()
    assert hashed == []


def test_links_to_a_verified_artifact_do_not_count_as_a_change(
    mlp: EagerModel, hashed: list[str], tmp_path: Path
) -> None:
    publish(mlp, tmp_path / "artifacts" / "model")
    mlp.verify_cached()
    assert hashed == []
    unpublish(tmp_path / "artifacts")  # not by the run that has verified it
    mlp.verify_cached()
    assert len(hashed) == len(mlp.manifest.files)
    mlp.verify_cached()
    assert len(hashed) == len(mlp.manifest.files)


def test_a_change_before_links_are_made_is_noticed(
    mlp: EagerModel, hashed: list[str], tmp_path: Path
) -> None:
    status = mlp.payload_path.stat()
    raw = bytearray(mlp.payload_path.read_bytes())
    raw[-1] ^= 1
    mlp.payload_path.chmod(0o644)
    mlp.payload_path.write_bytes(raw)
    os.utime(mlp.payload_path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as if unchanged
    publish(mlp, tmp_path / "artifacts" / "model")
    with pytest.raises(ArtifactInvalid, match="is not the file that was sealed"):
        mlp.verify_cached()
