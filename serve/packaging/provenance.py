"""Where an archive's model comes from: what the archive says of itself, and holds to."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from compress.artifacts.artifact import FileDigest, Step
from compress.common.atomic_files import sha256_of
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid
from compress.common.signature import Signature
from compress.common.strict_json import canonical_json
from compress.core.run_history import History

if TYPE_CHECKING:
    from collections.abc import Mapping

PROVENANCE = "provenance.json"


class Packaged(Settings):
    """The artifact inside an archive."""

    kind: str
    digest: str
    """SHA-256 of its manifest."""
    payload: str
    """Name of its deployed file, and of the member that holds it."""
    sha256: str
    """SHA-256 of that file."""
    traced_from: str = ""
    """Digest of the eager artifact whose graph it is; its code does not travel."""

    @property
    def origin(self) -> str:
        """Digest of the artifact that was handed in."""
        return self.traced_from or self.digest


class Provenance(Settings):
    """Where an archive's model comes from, carried inside the archive."""

    version: Literal[2] = 2
    signature: Signature
    artifact: Packaged
    lineage: tuple[Step, ...]
    """The packaged artifact's lineage."""
    history: History | None
    """What the run knew of the stages; None where it was packed without one."""
    members: dict[str, FileDigest]
    """Every other member of the archive."""
    seal: str = ""
    """SHA-256 of this record without its seal: it tells damage, not forgery."""

    def sealed(self) -> bytes:
        """Return the record as the member's bytes."""
        content = self.model_dump(mode="json", exclude={"seal"})
        seal = hashlib.sha256(canonical_json(content).encode()).hexdigest()
        return (canonical_json({**content, "seal": seal}) + "\n").encode()

    @classmethod
    def read(cls, data: bytes, where: str) -> Provenance:
        """Return the record in a member's bytes.

        Raises:
            ArtifactInvalid: it is no such record, or not as it was sealed.
        """
        try:
            record = cls.model_validate_json(data)
        except ValidationError as error:
            raise ArtifactInvalid(f"{where}: {PROVENANCE}: {error.errors()[0]['msg']}") from error
        if record.sealed() != data:
            raise ArtifactInvalid(f"{where}: member {PROVENANCE} is not the record that was sealed")
        return record


def refuse_broken_chain(record: Provenance, where: str) -> None:
    """Raise unless each recorded stage read what the one before it made.

    Raises:
        ArtifactInvalid: two digests that should be one differ; the message names the stage.
    """
    if record.history is None:
        return
    made = {"source": record.history.source_digest}
    made |= {stage.name: stage.digest for stage in record.history.stages}
    stages = record.history.stages
    for stage, step in zip(stages, record.lineage[-len(stages) :], strict=False):
        if (stage.stage, made.get(stage.input)) != (step.stage, step.inputs.get("input")):
            raise ArtifactInvalid(
                f"{where}: {PROVENANCE}: stage {stage.name} is recorded as {stage.stage} of "
                f"{made.get(stage.input)}, and its lineage says {step.stage} of "
                f"{step.inputs.get('input')}"
            )
    last = record.history.stages[-1].name if record.history.stages else "source"
    if made[last] != record.artifact.origin:
        raise ArtifactInvalid(
            f"{where}: {PROVENANCE}: the last stage, {last}, made {made[last]}, and the packaged "
            f"artifact is {record.artifact.origin}"
        )


def digest_of(content: bytes | Path) -> FileDigest:
    """Return the size and hash of bytes, or of a file's."""
    if isinstance(content, Path):
        return FileDigest(sha256=sha256_of(content), bytes=content.stat().st_size)
    return FileDigest(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))


def digests_of(members: Mapping[str, bytes | Path]) -> dict[str, FileDigest]:
    """Return the size and hash of each member."""
    return {name: digest_of(content) for name, content in members.items()}
