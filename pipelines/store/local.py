"""The store of a run: artifacts by the hash of everything that decides them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from filelock import FileLock, Timeout, lock_descriptor

from compress.artifacts.artifact import MANIFEST, Artifact, replace_artifact
from compress.common.atomic_files import partial_folder, remove, remove_leftovers, write_atomically
from compress.common.dependency_recorder import Dependencies, recording
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.sealed_json import read_sealed, write_sealed
from compress.core.context import ExportCache
from compress.pipelines.store.entry import (
    FORMAT,
    FORMAT_FILE,
    RECORD,
    Entry,
    Record,
    Surroundings,
    check_format,
    key_of,
    shortened,
)
from compress.pipelines.system.jsonl_log import log_event
from compress.pipelines.system.machine_info import machine, versions

if TYPE_CHECKING:
    from compress.data.fingerprint import Contents
    from compress.pipelines.store.remote import Remote

WORKING_FOLDER = Path()
WORK = "work"  # folder of the checkpoints from which interrupted stages resume, by stage
LAST_PARTS_FILE = "last.json"
"""What decided each stage when it last ran, from which a run explains why it runs again."""
DONE_FILE = "done"
"""In a stage's work folder: the key of the artifact, once that is being committed."""
LOCK_FILE = "lock"
SAMPLES_FOLDER = "samples"
KEPT_SPLITS = 16  # number of splits whose hashes stay in a store; the oldest are removed
BYTES_OF_A_HASH = 16


class Store:
    """A directory of entries by key."""

    def __init__(
        self,
        root: Path,
        remote: Remote | None = None,
        *,
        folder: Path = WORKING_FOLDER,
        code: Path | None = None,
        announce: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Use a directory inside that of a run's results as a store.

        Files that user code reads are relative to the pipeline's `folder`; `code` has its modules.
        """
        self.root, self._remote, self._announce = root, remote, announce
        self.lock: int | None = None
        self.warnings: list[str] = []  # damaged or changed files that were found, for the report
        outputs = root, root.parent / "artifacts"
        self.surroundings = Surroundings(folder, code or folder, outputs, self._warn)
        self._unusable: dict[str, str] = {}  # key → why its entry was not used

    @contextmanager
    def locked(self) -> Iterator[Self]:
        """Open the store for one run, and remove what a killed run left; a second run waits."""
        root = self.root
        with store_lock(root, self._announce) as self.lock:
            self.refuse_another_format()
            if not (root / FORMAT_FILE).exists():
                write_atomically(root / FORMAT_FILE, json.dumps({"format": FORMAT}))
            for names in ("*.json", "*.html"):  # a folder there is none of a run's
                remove_leftovers(root.parent, names)
            work = root / WORK
            for entry in (root.parent / "artifacts", root, work, *root.iterdir()):
                if entry.is_dir():
                    remove_leftovers(entry)
            for done in work.glob(f"*/{DONE_FILE}"):
                # Its stage has finished: a killed run could not remove the checkpoints.
                if (root / done.read_text(encoding="utf-8") / RECORD).exists():
                    remove(done.parent)
            if self._remote:
                self._remote.begin(root)
            yield self

    def refuse_another_format(self) -> None:
        """Refuse a store of another format."""
        with suppress(FileNotFoundError):
            content = (self.root / FORMAT_FILE).read_bytes()
            again = f"remove {self.root} (everything in it can be made again)"
            check_format(content, str(self.root), f"choose another --out, or {again}")

    def commit(self, name: str, entry: Entry, record: Record) -> None:
        """Add a stage's artifact to the store, and remove the checkpoints that it resumed from."""
        work = self.root / WORK / name
        if work.is_dir():
            # If the run is killed between the next two steps, the next one removes it by this.
            write_atomically(work / DONE_FILE, entry.path.name)
        entry.commit(record)
        remove(work)
        # Not in the background: an upload during measurements would distort latencies.
        if self._remote:
            artifact: Artifact = Artifact.from_directory(entry.artifact_path)
            self._remote.share(entry.path.name, artifact, record)

    def get(self, entry: Entry, *, downloads: bool = True) -> tuple[Artifact, Record] | None:
        """Return an artifact and its record, None on a miss; if need be `downloads` both."""
        found, remote = self._load(entry), self._remote
        key, path = entry.path.name, entry.artifact_path
        if found is None and remote:
            found = remote.fetch(key, path, self._outdated, downloads=downloads)
            if found:
                entry.fetched_from = remote.url
                if downloads:
                    entry.commit(found[1])
        elif found and downloads:
            entry.mark_used()
            if remote:  # an upload that failed in an earlier run is made up for
                remote.share(key, *found)
        return found

    def _load(self, entry: Entry) -> tuple[Artifact, Record] | None:
        try:
            found = entry.load()
        except ArtifactInvalid as error:
            self._unusable[entry.path.name] = "its artifact or record is damaged"
            self._warn(f"{error}; it is made and measured again")
            return None
        return None if found is None or self._outdated(found[1]) else found

    def _outdated(self, record: Record) -> str:
        change = self.surroundings.change(record.depends)
        if change:
            self._unusable[key_of(record.parts)] = change
        return change

    def _warn(self, what: str) -> None:
        if what not in self.warnings:
            self.warnings.append(what)
            self._announce(f"warning: {what}")
            log_event("message", what, level="warning")

    def entry(self, parts: dict[str, Any]) -> Entry:
        """Return the entry of an artifact, given everything that decides it."""
        return Entry(self.root / key_of(parts), self.surroundings)

    def explain_miss(self, name: str, parts: dict[str, Any], data: Contents | None) -> str:
        """Return why a stage must run: what differs from its last run here."""
        unusable = self._unusable.get(key_of(parts))
        if unusable:
            return unusable
        before = self.last_parts(name)
        if before is None:
            return "not run before"
        old, new = (Dependencies.model_validate(p.get("depends", {})) for p in (before, parts))
        found = old.difference(new) or _difference(before, parts)
        if data is not None and found.startswith("data.splits."):
            found = samples_changed(self.root, before["data"], data) or found
        return found or "its artifact is gone"

    def last_parts(self, name: str) -> dict[str, Any] | None:
        """Return what decided a stage's artifact when it last ran here; None if it never did."""
        return self._last().get(name)

    def save_last_parts(self, name: str, parts: dict[str, Any]) -> None:
        """Save what decided a stage's artifact, to explain the next run."""
        last = self._last()
        if last.get(name) != parts:
            write_sealed(self.root / LAST_PARTS_FILE, {**last, name: parts})

    def _last(self) -> dict[str, Any]:
        try:
            return read_sealed(self.root / LAST_PARTS_FILE, dict[str, Any])
        except (FileNotFoundError, ArtifactInvalid):
            return {}  # it only explains why a stage runs


def publish(artifact: Artifact, path: Path) -> None:
    """Copy an artifact to a readable path, by hard links where the file system has them."""
    with partial_folder(path) as partial, artifact.keep_verified():
        shutil.copytree(artifact.path, partial, copy_function=_link, dirs_exist_ok=True)
        replace_artifact(partial, path)


def unpublish(folder: Path) -> None:
    """Remove the artifacts that an earlier run published; the store still has them."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if (path / MANIFEST).is_file():
            remove(path)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Another file system, or one without hard links.
        shutil.copy2(source, target)


def _difference(before: Any, after: Any, path: str = "") -> str:
    """Return the first part that differs, by its dotted path; empty if none does."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            found = _difference(before.get(key), after.get(key), f"{path}.{key}" if path else key)
            if found:
                return found
        return ""
    return "" if before == after else f"{path} {shortened(before)} → {shortened(after)}"


@contextmanager
def keep_idle(out: Path) -> Iterator[bool]:
    """Keep runs from starting in a results folder during a block; yield whether none runs there."""
    try:
        # Read only, so that results of another user can be looked at.
        descriptor = os.open(out / ".store" / LOCK_FILE, os.O_RDONLY)
    except OSError:  # only the results were copied here, or nothing can be written anyway
        yield True
        return
    try:
        yield lock_descriptor(descriptor, blocking=False)
    finally:
        os.close(descriptor)


@contextmanager
def store_lock(root: Path, announce: Callable[[str], None]) -> Iterator[int]:
    """Hold a store's lock during a block; announce and wait while another run holds it.

    Yields its descriptor, which worker processes inherit: those of a killed run keep the store
    locked until they have ended.
    """
    descriptors: list[int] = []
    # Without flock, an existing file would be the lock, and a killed run would hold it for ever.
    file, note = root / LOCK_FILE, descriptors.append
    lock = FileLock(file, mode=0o644, fallback_to_soft=False, on_acquired=note)
    blocking = False
    try:
        while not descriptors:
            root.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(blocking=blocking)
            except Timeout:
                announce(f"waiting for another run in {root.parent} to end (Ctrl-C gives up)")
                blocking = True
            except FileNotFoundError:
                continue  # the store was removed while this run waited
    except OSError as error:
        raise PipelineInvalid(
            f"{root.parent}: cannot be written ({error.strerror}); choose another with --out"
        ) from None
    try:
        yield descriptors[0]
    finally:
        lock.release()


def note_samples(store: Path, contents: Contents) -> None:
    """Save the hashes of each split's samples in a store, under the split's digest."""
    with suppress(OSError):  # they only make explanations more precise
        (store / SAMPLES_FOLDER).mkdir(exist_ok=True)
        for split, parts in contents.parts["splits"].items():
            file = _hash_file(store, parts)
            if not file.exists():
                write_atomically(file, contents.hashes[split].tobytes())
        files = (store / SAMPLES_FOLDER).glob("*.hashes")
        by_age = sorted(files, key=lambda file: file.stat().st_mtime_ns)
        for old in by_age[:-KEPT_SPLITS]:
            remove(old)


def samples_changed(store: Path, before: dict[str, Any], now: Contents) -> str:
    """Describe how many samples of the first changed split differ; empty if that is unknown."""
    past = before.get("splits", {})
    for split, parts in now.parts["splits"].items():
        if split in past and past[split] != parts:
            try:
                hashes = _hash_file(store, past[split]).read_bytes()
            except OSError:
                return ""
            if hashlib.sha256(hashes).hexdigest() != past[split]["sha256"]:
                return ""  # changed since
            old, current = _counted(hashes), _counted(now.hashes[split].tobytes())
            old_count, count = past[split]["samples"], parts["samples"]
            new, gone = (current - old).total(), (old - current).total()
            if (old.total(), current.total()) != (old_count, count):
                # Of long splits not every sample is hashed: the number is a lower bound, and means
                # something between splits of the same length alone.
                is_known = new and old_count == count
                return f"data.{split}: at least {new} of {count} samples differ" if is_known else ""
            if new == gone == 0:
                return f"data.{split}: the same samples in another order"
            if new == gone:
                return f"data.{split}: {new} of {count} samples differ"
            return f"data.{split}: {new} samples are new, {gone} are gone"
    return ""


def _hash_file(store: Path, parts: dict[str, Any]) -> Path:
    return store / SAMPLES_FOLDER / f"{parts['sha256'][:32]}.hashes"


def _counted(hashes: bytes) -> Counter[bytes]:
    places = range(0, len(hashes), BYTES_OF_A_HASH)
    return Counter(hashes[place : place + BYTES_OF_A_HASH] for place in places)


class StoredExports(ExportCache):
    """Exports by everything that decides them: model and runtime, versions, and the machine."""

    def __init__(self, store: Store, judging: Mapping[str, str | None]) -> None:
        """Use a store; `judging` is with what exports are compared: data, and how many samples."""
        super().__init__()
        self.store, self.judging = store, judging

    def _find_or_write(self, key: str, write: Callable[[Path], Artifact]) -> Artifact:
        parts: dict[str, Any] = {
            "uncompressed": key,
            "versions": versions(),
            "machine": machine(),  # compiled code is for one kind of processor
            **self.judging,
        }
        entry = self.store.entry(parts)
        found = self.store.get(entry)
        if found is not None:
            return found[0]
        began = time.monotonic()
        with recording() as recorded:
            artifact = write(entry.artifact_path)
        record = Record(
            parts=parts,
            digest=artifact.digest,
            seconds=time.monotonic() - began,
            depends=self.store.surroundings.dependencies(recorded),
        )
        self.store.commit(key, entry, record)
        return artifact
