"""One artifact in a store: why it exists, what was measured on it, and whether both are whole.

    record.json    what decided the artifact, its digest, what user code read; written once
    answers.json   what was measured on it

Both hold a digest of their own content, and are bound to the entry's key and to the artifact.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import JsonValue, ValidationError

from compress.artifacts.artifact import Artifact
from compress.common.atomic_files import write_atomically
from compress.common.config import Settings
from compress.common.dependency_recorder import Dependencies, Recording, recording
from compress.common.errors import ArtifactInvalid
from compress.common.strict_json import canonical_json, dump_sealed, load_sealed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RECORD = "record.json"
ANSWERS = "answers.json"


class Record(Settings):
    """What the store knows of one artifact."""

    version: Literal[2] = 2
    parts: dict[str, JsonValue]
    """Everything known beforehand that decided the artifact; their hash is its key."""
    digest: str
    """Of the artifact's manifest."""
    seconds: float
    """How long the stage took."""
    depends: Dependencies = Dependencies()
    """What user code read while the artifact was made."""

    def to_bytes(self) -> bytes:
        """Return it as a file that shows any change."""
        return dump_sealed(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls, raw: bytes, key: str) -> Record:
        """Return the record of a key.

        Raises:
            ArtifactInvalid: it was changed since it was written, or belongs to another key.
        """
        try:
            record = cls.model_validate(load_sealed(raw))
        except ValidationError:
            raise ArtifactInvalid("is no record of this version") from None
        if key_of(record.parts) != key:
            raise ArtifactInvalid("is not the record of this key")
        return record


class Answer(Settings):
    """One thing that was measured."""

    value: JsonValue
    depends: Dependencies = Dependencies()
    """What user code read meanwhile, the metric's above all."""


class Answers(Settings):
    """What was measured on one artifact."""

    version: Literal[1] = 1
    key: str
    """Of the entry."""
    digest: str
    """Of the artifact that was measured."""
    answers: dict[str, Answer] = {}
    """Question, as canonical JSON → what was measured."""


@dataclass(frozen=True)
class Surroundings:
    """What entries need to know of a run."""

    folder: Path
    """The pipeline's: files that user code reads are named relative to it."""
    code: Path
    """The folder of the user's modules."""
    outputs: tuple[Path, ...]
    """Folders that the toolkit writes."""
    warn: Callable[[str], None]

    def dependencies(self, recorded: Recording) -> Dependencies:
        """Return what user code read, with digests."""
        return recorded.dependencies(self.folder, self.code, self.outputs)


class Entry:
    """The place of one key in the store."""

    def __init__(self, path: Path, surroundings: Surroundings) -> None:
        self.path = path
        self.artifact_path = path / "artifact"
        self._record_path, self._answers_path = path / RECORD, path / ANSWERS
        self._surroundings = surroundings
        self.fetched_from = ""
        """URL of the shared store that the artifact came from in this run."""

    def load(self) -> tuple[Artifact, Record] | None:
        """Return the artifact and its record, or None where there is no record.

        Raises:
            ArtifactInvalid: the record or the artifact is not as it was written.
        """
        try:
            raw = self._record_path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            record = Record.from_bytes(raw, self.path.name)
        except ArtifactInvalid as error:
            raise ArtifactInvalid(f"{self._record_path} {error}") from None
        artifact = Artifact.from_directory(self.artifact_path)
        artifact.verify()
        if artifact.digest != record.digest:
            raise ArtifactInvalid(f"{artifact.path} is not the artifact that {RECORD} names")
        return artifact, record

    def commit(self, record: Record) -> None:
        """Make the artifact at ``artifact_path`` part of the store."""
        write_atomically(self._record_path, record.to_bytes())

    def used(self) -> None:
        """Note that the artifact was used now, for who removes what was not for long."""
        with suppress(OSError):
            os.utime(self._record_path)

    def cached_value(
        self, question: dict[str, Any], artifact: Artifact, measure: Callable[[], JsonValue]
    ) -> JsonValue:
        """Return what was measured before on the same artifact, or measure now and keep it.

        It is measured again where what is kept was changed, or user code would read other things.
        """
        kept, key = self._answers_on(artifact), canonical_json(question)
        known, around = kept.answers.get(key), self._surroundings
        if known and not known.depends.change(around.folder):
            return known.value
        with recording() as recorded:
            value = measure()
        depends = around.dependencies(recorded)
        answers = {**kept.answers, key: Answer(value=value, depends=depends)}
        kept = kept.model_copy(update={"answers": answers})
        write_atomically(self._answers_path, dump_sealed(kept.model_dump(mode="json")))
        return value

    def _answers_on(self, artifact: Artifact) -> Answers:
        """Return what is kept of an artifact's figures, nothing where that is not as written."""
        none = Answers(key=self.path.name, digest=artifact.digest)
        try:
            kept = Answers.model_validate(load_sealed(self._answers_path.read_bytes()))
        except FileNotFoundError:
            return none
        except (ArtifactInvalid, ValidationError) as error:
            why = str(error) if isinstance(error, ArtifactInvalid) else "is of another version"
        else:
            if (kept.key, kept.digest) == (none.key, none.digest):
                return kept
            if kept.key == none.key:  # left by an artifact that this one has replaced
                return none
            why = "is that of another artifact"
        self._surroundings.warn(f"{self._answers_path} {why}; its figures are measured again")
        return none


def key_of(parts: dict[str, Any]) -> str:
    """Return the name under which a store keeps what was made of these."""
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]
