"""One artifact in a store, with what decided it and what was measured on it.

    record.json    what decided the artifact, its digest, what user code read; written once
    answers.json   what was measured on it

Both hold a digest of their own content, the entry's key and the artifact's digest, so that a
changed or exchanged file is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue, ValidationError

from compress.artifacts.artifact import Artifact
from compress.common.atomic_files import write_atomically
from compress.common.config import Settings
from compress.common.dependency_recorder import Dependencies, Recording
from compress.common.errors import ArtifactInvalid, PipelineInvalid, located
from compress.common.sealed_json import canonical_json, dump_sealed, load_sealed, read_sealed

FORMAT = 1  # of the folders and files of a store; a store without a format file has this one too
FORMAT_FILE = "format.json"
RECORD = "record.json"
ANSWERS = "answers.json"


class Record(Settings):
    """What decided one artifact: the content of `record.json`."""

    version: Literal[2] = 2
    parts: dict[str, JsonValue]
    """Everything known before the stage ran that decides the artifact; its hash is the key."""
    digest: str
    """Of the artifact's manifest."""
    seconds: float
    depends: Dependencies = Dependencies()
    """What user code read while the artifact was made."""

    def to_bytes(self) -> bytes:
        """Return the content of `record.json`, with a digest of itself."""
        return dump_sealed(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls, raw: bytes, key: str) -> Record:
        """Return the record of a key, or raise ArtifactInvalid if it was changed."""
        try:
            record = cls.model_validate(load_sealed(raw))
        except ValidationError:
            raise ArtifactInvalid("is not a record of this version") from None
        if key_of(record.parts) != key:
            raise ArtifactInvalid("is not the record of this key")
        return record


class StoredValue(Settings):
    """A measured value."""

    value: JsonValue
    depends: Dependencies = Dependencies()
    """What user code read while it was measured, the metric's above all."""


class StoredValues(Settings):
    """What was measured on one artifact: the content of `answers.json`."""

    version: Literal[1] = 1
    key: str
    digest: str
    answers: dict[str, StoredValue] = {}
    """What was measured and under which conditions, as canonical JSON → the value."""


@dataclass(frozen=True)
class Surroundings:
    """Folders that tell what user code reads, and where warnings go."""

    folder: Path
    """The pipeline file's: files that user code reads are named relative to it."""
    code: Path
    outputs: tuple[Path, ...]
    """Folders that the toolkit writes."""
    warn: Callable[[str], None]

    def dependencies(self, recorded: Recording) -> Dependencies:
        """Return the files and variables that user code read, with digests."""
        return recorded.dependencies(self.folder, self.code, self.outputs)

    def change(self, depends: Dependencies) -> str:
        """Describe the first of some dependencies that has changed since; empty if none has."""
        return depends.change(self.folder, self.code)


class Entry:
    """The folder of one key in the store."""

    def __init__(self, path: Path, surroundings: Surroundings) -> None:
        self.path = path
        self.artifact_path = path / "artifact"
        self._record_path, self._answers_path = path / RECORD, path / ANSWERS
        self._surroundings = surroundings
        self.fetched_from = ""  # URL of the shared store that the artifact came from in this run

    def load(self) -> tuple[Artifact, Record] | None:
        """Return the artifact and its record, None without one, or raise ArtifactInvalid."""
        try:
            raw = self._record_path.read_bytes()
        except FileNotFoundError:
            return None
        with located(f"{self._record_path} "):
            record = Record.from_bytes(raw, self.path.name)
        artifact = Artifact.from_directory(self.artifact_path)
        artifact.verify()
        if artifact.digest != record.digest:
            raise ArtifactInvalid(f"{artifact.path} is not the artifact that {RECORD} names")
        return artifact, record

    def commit(self, record: Record) -> None:
        """Make the artifact at ``artifact_path`` part of the store."""
        write_atomically(self._record_path, record.to_bytes())

    def mark_used(self) -> None:
        """Set the record's time to now: `compress gc` removes what was not used for long."""
        with suppress(OSError):
            os.utime(self._record_path)

    def lookup(self, key: dict[str, Any], artifact: Artifact) -> StoredValue | None:
        """Return what was measured under a key, unless user code would now read other files."""
        stored = self._values_of(artifact).answers.get(canonical_json(key))
        return None if not stored or self._surroundings.change(stored.depends) else stored

    def store(
        self, key: dict[str, Any], artifact: Artifact, value: JsonValue, recorded: Recording
    ) -> None:
        """Store a value that was measured on an artifact; user code read `recorded` meanwhile."""
        values = self._values_of(artifact)
        depends = self._surroundings.dependencies(recorded)
        answers = {**values.answers, canonical_json(key): StoredValue(value=value, depends=depends)}
        values = values.model_copy(update={"answers": answers})
        # Not indented, which Python's encoder does slowly: figures of all samples may be there.
        write_atomically(self._answers_path, dump_sealed(values.model_dump(mode="json")))

    def _values_of(self, artifact: Artifact) -> StoredValues:
        empty = StoredValues(key=self.path.name, digest=artifact.digest)
        try:
            values = read_sealed(self._answers_path, StoredValues)
        except FileNotFoundError:
            return empty
        except ArtifactInvalid as error:
            why = str(error)
        else:
            if (values.key, values.digest) == (empty.key, empty.digest):
                return values
            if values.key == empty.key:  # left by an artifact that this one has replaced
                return empty
            why = f"{self._answers_path} is that of another artifact"
        self._surroundings.warn(f"{why}; its figures are measured again")
        return empty


def key_of(parts: dict[str, Any]) -> str:
    """Hash everything that decides an artifact to its key, the name of its folder in the store."""
    # 128 bits: no two keys meet by chance.
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]


def check_format(content: bytes, store: str, advice: str) -> None:
    """Raise PipelineInvalid for a format file that does not name the format of this version."""
    try:
        found = json.loads(content)["format"]
    except (ValueError, TypeError, KeyError):
        found = "unknown"
    if found != FORMAT:
        raise PipelineInvalid(
            f"{store}: is of format {shortened(found)}, and this version of compress reads "
            f"format {FORMAT}; {advice}"
        )


def shortened(value: Any) -> str:
    """Return the beginning of a value as text, for messages."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 24 else f"{text[:12]}…"
