"""What was computed before, by content: an artifact, what was measured on it, and why it exists."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

from pydantic import JsonValue, ValidationError

from compress.core.artifact import MANIFEST, Artifact, canonical_json, replace_artifact
from compress.core.errors import ArtifactInvalid, PipelineInvalid
from compress.core.files import partial_of, remove, sweep, write_atomically
from compress.core.settings import Settings
from pipelines.lock import lock
from pipelines.samples import samples_changed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from compress.core.contents import Contents
    from pipelines.remote import Remote

FORMAT = 1
"""Of the store's folders and records; a store that does not tell its format has this one."""
FORMAT_FILE = "format.json"
WORK = "work"
"""Folder of what stages keep to go on after an interruption, by stage."""
RECORD = "record.json"
DONE = "done"
"""In a stage's work: the key of the artifact that was made of it."""


class Record(Settings):
    """What the store knows of one artifact."""

    version: Literal[1] = 1
    parts: dict[str, JsonValue]
    """Everything that decided the artifact; their hash is its key."""
    digest: str
    seconds: float
    """How long the stage took."""
    answers: dict[str, JsonValue] = {}
    """Question, as canonical JSON → what was measured."""


class Entry:
    """The place of one key in the store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.artifact_path = path / "artifact"
        self._record_path = path / RECORD
        self.fetched_from = ""
        """URL of the shared store that the artifact came from in this run."""

    def load(self) -> tuple[Artifact, Record] | None:
        """Return the artifact and its record, or None when absent or damaged."""
        try:
            record = Record.model_validate_json(self._record_path.read_bytes())
            artifact = Artifact.at(self.artifact_path)
            artifact.verify()
        except (FileNotFoundError, ValidationError, ArtifactInvalid):
            return None
        return (artifact, record) if artifact.digest == record.digest else None

    def commit(self, record: Record) -> None:
        """Make the artifact at ``artifact_path`` part of the store."""
        write_atomically(self._record_path, record.model_dump_json(indent=1))

    def used(self) -> None:
        """Note that the artifact was used now, for who removes what was not for long."""
        with suppress(OSError):
            os.utime(self._record_path)

    def answer(self, question: dict[str, Any], measure: Callable[[], JsonValue]) -> JsonValue:
        """Return what was measured before, or measure now and keep it."""
        record = Record.model_validate_json(self._record_path.read_bytes())
        key = canonical_json(question)
        if key not in record.answers:
            answers = {**record.answers, key: measure()}
            record = record.model_copy(update={"answers": answers})
            self.commit(record)
        return record.answers[key]


class Store:
    """A directory of entries by key."""

    def __init__(self, root: Path, remote: Remote | None = None) -> None:
        """Take a directory, and perhaps a store that other machines share."""
        self.root, self._remote = root, remote
        self.lock: int | None = None
        """Descriptor that holds the lock of an open store."""

    @classmethod
    @contextmanager
    def locked(
        cls, root: Path, announce: Callable[[str], None], remote: Remote | None = None
    ) -> Iterator[Store]:
        """Open the store for one run, and sweep up what a killed one left; a second run waits.

        Raises:
            PipelineInvalid: the directory, or the shared store, cannot be written, or is of
                another format.
        """
        descriptor = lock(root, announce)
        try:
            store = cls(root, remote)
            store.lock = descriptor
            store.refuse_another_format()
            if not (root / FORMAT_FILE).exists():
                write_atomically(root / FORMAT_FILE, json.dumps({"format": FORMAT}))
            store._sweep()
            if remote:
                remote.begin(root)
            yield store
        finally:
            os.close(descriptor)

    def refuse_another_format(self) -> None:
        """Refuse a store that another version wrote in another way.

        Raises:
            PipelineInvalid: it is of another format.
        """
        try:
            found = format_in((self.root / FORMAT_FILE).read_bytes())
        except FileNotFoundError:
            return
        if found != FORMAT:
            raise PipelineInvalid(
                f"{self.root}: is of format {found}, and this version of compress reads "
                f"format {FORMAT}; choose another --out, or remove {self.root} (everything in it "
                "can be made again)"
            )

    def settle(self, name: str, entry: Entry, record: Record) -> None:
        """Make a stage's artifact part of the store, and remove what it kept to go on."""
        work = self.root / WORK / name
        if work.is_dir():
            # Killed between the next two steps, the work would stay for ever.
            write_atomically(work / DONE, entry.path.name)
        entry.commit(record)
        remove(work)
        # Not in the background, where it would run while the stage is measured.
        if self._remote:
            self._share(entry, Artifact.at(entry.artifact_path), record)

    def find(self, entry: Entry) -> tuple[Artifact, Record] | None:
        """Return an artifact and its record from here, else from the shared store, else None."""
        found = entry.load()
        if found:
            entry.used()
            self._share(entry, *found)
        elif self._remote and (found := self._remote.fetch(entry.path.name, entry.artifact_path)):
            entry.commit(found[1])
            entry.fetched_from = self._remote.url
        return found

    def foresee(self, entry: Entry) -> tuple[Artifact, Record] | None:
        """Return what :meth:`find` would; what is in the shared store alone stays there."""
        found = entry.load()
        if not found and self._remote:
            found = self._remote.look(entry.path.name, entry.artifact_path)
            entry.fetched_from = self._remote.url
        return found

    def _share(self, entry: Entry, artifact: Artifact, record: Record) -> None:
        if self._remote:
            self._remote.share(entry.path.name, artifact, record)

    def _sweep(self) -> None:
        """Remove what killed runs left half made, and work that has come to its end."""
        work, out = self.root / WORK, self.root.parent
        for names in ("*.json", "*.html"):  # a folder there is none of a run's
            sweep(out, names)
        for folder in (out / "artifacts", self.root, work):
            sweep(folder)
        for entry in self.root.iterdir():
            if entry.is_dir():
                sweep(entry)
        for done in work.glob(f"*/{DONE}"):
            if (self.root / done.read_text(encoding="utf-8") / RECORD).exists():
                remove(done.parent)

    def entry(self, parts: dict[str, Any]) -> Entry:
        """Return the place of an artifact, given everything that decides it."""
        return Entry(self.root / key_of(parts))

    def why(self, name: str, parts: dict[str, Any], data: Contents | None) -> str:
        """Return why a stage must run: what differs from its last run here."""
        before = self.last_parts(name)
        if before is None:
            return "not run before"
        found = _difference(before, parts)
        if data is not None and found.startswith("data.splits."):
            found = samples_changed(self.root, before["data"], data) or found
        return found or "its artifact is gone or damaged"

    def last_parts(self, name: str) -> dict[str, Any] | None:
        """Return what decided a stage's artifact when it was last run here, if it was."""
        return self._last().get(name)

    def remember(self, name: str, parts: dict[str, Any]) -> None:
        """Note what a stage of this name was last run with."""
        if self._last().get(name) != parts:
            write_atomically(self.root / "last.json", canonical_json({**self._last(), name: parts}))

    def _last(self) -> dict[str, Any]:
        try:
            last = json.loads((self.root / "last.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return last if isinstance(last, dict) else {}


def key_of(parts: dict[str, Any]) -> str:
    """Return the name under which a store keeps what was made of these."""
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()[:32]


def format_in(content: bytes) -> str | int:
    """Return the format that a store's file tells."""
    try:
        found = json.loads(content)["format"]
    except (ValueError, TypeError, KeyError):
        found = "unknown"
    return found if found == FORMAT else _short(found)


def publish(artifact: Artifact, path: Path) -> None:
    """Show an artifact under a readable path, by hard links where the file system has them."""
    partial = partial_of(path)
    shutil.rmtree(partial, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(artifact.path, partial, copy_function=_link)
    replace_artifact(partial, path)


def unpublish(folder: Path) -> None:
    """Remove what an earlier run published; the store keeps it, and other files stay."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if (path / MANIFEST).is_file():
            remove(path)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _difference(before: Any, after: Any, path: str = "") -> str:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            found = _difference(before.get(key), after.get(key), f"{path}.{key}" if path else key)
            if found:
                return found
        return ""
    return "" if before == after else f"{path} {_short(before)} → {_short(after)}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 24 else f"{text[:12]}…"
