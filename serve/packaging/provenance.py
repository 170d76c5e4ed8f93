"""The provenance record of a TorchServe archive: its artifact, lineage and members' hashes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from compress.artifacts.artifact import FileDigest, Step
from compress.common.atomic_files import sha256_of
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid
from compress.common.sealed_json import dump_sealed, load_sealed
from compress.common.signature import Signature
from compress.core.verdict import History

if TYPE_CHECKING:
    from collections.abc import Mapping

PROVENANCE = "provenance.json"


class Packaged(Settings):
    """The artifact packed in an archive."""

    kind: str
    digest: str
    """SHA-256 of its manifest."""
    payload: str
    """Name of its deployed file, and of the archive's member with it."""
    sha256: str
    """SHA-256 of that file."""
    traced_from: str = ""
    """Digest of the eager artifact that it was traced from, whose code is not packed."""

    @property
    def origin(self) -> str:
        """Digest of the packaging stage's input artifact."""
        return self.traced_from or self.digest


class Provenance(Settings):
    """The archive member `provenance.json`."""

    version: Literal[2] = 2
    signature: Signature
    artifact: Packaged
    lineage: tuple[Step, ...]
    """The packaged artifact's lineage."""
    history: History | None
    """The run's record of its stages; None if the model was packed outside a run."""
    members: dict[str, FileDigest]
    """Every other member of the archive."""

    def sealed(self) -> bytes:
        """Serialize the record with its digest."""
        return dump_sealed(self.model_dump(mode="json"))

    @classmethod
    def read(cls, data: bytes, where: str) -> Provenance:
        """Parse a record; ArtifactInvalid where it is none, or was changed after sealing."""
        try:
            return cls.model_validate(load_sealed(data))
        except ValidationError as error:
            raise ArtifactInvalid(f"{where}: {PROVENANCE}: {error.errors()[0]['msg']}") from error
        except ArtifactInvalid as error:
            raise ArtifactInvalid(f"{where}: member {PROVENANCE} {error}") from None


def refuse_broken_chain(record: Provenance, where: str) -> None:
    """Raise ArtifactInvalid where a recorded stage did not read the output of the one before it."""
    if record.history is None:
        return
    outputs = {"source": record.history.source_digest}
    outputs |= {stage.name: stage.digest for stage in record.history.stages}
    stages = record.history.stages
    for stage, step in zip(stages, record.lineage[-len(stages) :], strict=False):
        if (stage.stage, outputs.get(stage.input)) != (step.stage, step.inputs.get("input")):
            raise ArtifactInvalid(
                f"{where}: {PROVENANCE}: stage {stage.name} is recorded as {stage.stage} of "
                f"{outputs.get(stage.input)}, and its lineage says {step.stage} of "
                f"{step.inputs.get('input')}"
            )
    last = record.history.stages[-1].name if record.history.stages else "source"
    if outputs[last] != record.artifact.origin:
        raise ArtifactInvalid(
            f"{where}: {PROVENANCE}: the last stage, {last}, made {outputs[last]}, and the "
            f"packaged artifact is {record.artifact.origin}"
        )


def digest_of(content: bytes | Path) -> FileDigest:
    """Return the size and hash of bytes or of a file."""
    if isinstance(content, Path):
        return FileDigest(sha256=sha256_of(content), bytes=content.stat().st_size)
    return FileDigest(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


def digests_of(members: Mapping[str, bytes | Path]) -> dict[str, FileDigest]:
    """Return the size and hash of each member."""
    return {name: digest_of(content) for name, content in members.items()}
