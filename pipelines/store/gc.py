"""Removes artifacts that have not been used for long, from a run's store or a shared one."""

from __future__ import annotations

import hashlib
import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import MANIFEST
from compress.common.atomic_files import remove
from compress.common.config import Settings
from compress.common.errors import PipelineInvalid
from pipelines.store.entry import RECORD
from pipelines.store.local import WORK, Store, store_lock
from pipelines.store.remote import (
    MANIFEST_BYTES,
    PARTIAL_FOLDER,
    RECORD_BYTES,
    SECONDS_TRUSTED,
    Failed,
    Objects,
    Remote,
)
from pipelines.system.error_context import readable_disk_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS_OF_UNIT = {"h": 3600, "d": 86_400, "w": 604_800}
MIN_SHARED_SECONDS = 2 * SECONDS_TRUSTED
"""Seconds. Half of it is the age up to which an upload relies on files that are there."""
KEY_PATTERN = re.compile("[0-9a-f]{32}")
OUR_NAMES = {
    "files": re.compile("[0-9a-f]{64}"),
    "manifests": re.compile(r"[0-9a-f]{64}\.json"),
    "records": re.compile(r"[0-9a-f]{32}\.json"),
    PARTIAL_FOLDER: re.compile("[0-9a-f]{16,32}-[0-9a-f]{32}"),
}
"""Names in a shared store's folders that are ours; other files are left alone."""


class Cleaned(Settings):
    """What was removed, or would be."""

    place: str
    dry_run: bool
    artifacts: int
    """How many were, or would be, removed."""
    kept: int
    """How many stay."""
    bytes: int
    """What that frees."""

    def lines(self) -> Iterator[str]:
        """Yield the result in words."""
        words = "would be removed, which would free" if self.dry_run else "removed, which freed"
        noun = "artifact" if self.artifacts == 1 else "artifacts"
        freed = f"{self.bytes / 2**20:.1f} MiB"
        yield f"{self.place}: {self.artifacts} {noun} {words} {freed}; {self.kept} stay"


def clean(place: str, older_than: str, dry_run: bool, announce: Callable[[str], None]) -> Cleaned:
    """Remove artifacts that have not been used for some time; stages make them again if needed.

    Args:
        place: a run's directory, or the URL of a shared store.
        older_than: such as ``30d``.
        dry_run: say what would be removed, and leave it.
        announce: receives a line if another run has to end first.
    """
    age = re.fullmatch(r"(\d{1,6})([hdw])", older_than)
    if not age:
        raise PipelineInvalid(
            f"--older-than {older_than}: expected hours, days or weeks, as 12h, 30d, 8w"
        )
    seconds = int(age[1]) * SECONDS_OF_UNIT[age[2]]
    if "://" not in place:
        with readable_disk_errors(Path(place)):
            return clean_own(Path(place), seconds, dry_run, announce)
    if seconds < MIN_SHARED_SECONDS:
        raise PipelineInvalid(
            f"--older-than {older_than}: a shared store keeps {MIN_SHARED_SECONDS // 86_400} days "
            "at least, as uploads under way rely on what is there"
        )
    return clean_shared(place, seconds, dry_run)


def clean_own(out: Path, seconds: int, dry_run: bool, announce: Callable[[str], None]) -> Cleaned:
    """Remove old entries and checkpoints of a run's store; published artifacts stay."""
    root = out / ".store"
    if not root.is_dir():
        raise PipelineInvalid(f"{out}: holds no results of a run; expected its --out, or a URL")
    with store_lock(root, announce):
        Store(root).refuse_another_format()
        shown = {_sha256(file) for file in out.glob(f"artifacts/*/{MANIFEST}")} - {None}
        folders = [folder for folder in root.iterdir() if KEY_PATTERN.fullmatch(folder.name)]
        entries = [folder for folder in folders if (folder / RECORD).exists()]
        old = [
            folder
            for folder in entries
            if _idle_seconds(folder / RECORD, folder) > seconds
            and _sha256(folder / "artifact" / MANIFEST) not in shown
        ]
        begun = (*(root / WORK).glob("*"), *(f for f in folders if f not in entries))
        # All files: writing one does not change the time of a folder further up.
        work = [f for f in begun if _idle_seconds(*f.rglob("*"), f) > seconds]
        stats = [
            path.lstat()
            for folder in (*old, *work)
            for path in folder.rglob("*")
            if not path.is_dir()
        ]
        # Removing a file with other hard links, as of a published artifact, frees nothing.
        freed = sum(stat.st_size for stat in stats if stat.st_nlink == 1)
        for folder in () if dry_run else (*old, *work):
            remove(folder)
    kept = len(entries) - len(old)
    return Cleaned(place=str(out), dry_run=dry_run, artifacts=len(old), kept=kept, bytes=freed)


def clean_shared(url: str, seconds: int, dry_run: bool) -> Cleaned:
    """Remove old records of a shared store, then the manifests and files that none needs.

    Other runs may use the store meanwhile: a file exists as long as a record names it, and an
    upload writes old files again. So young files are left alone, named by a record or not.
    """
    if not Remote(url, lambda _: None).refuse_another_format():
        raise PipelineInvalid(f"{url}: there is no store")
    try:
        return _SharedStoreCleaner(url, seconds, dry_run).clean()
    except Failed as error:
        raise PipelineInvalid(
            f"{url}: cannot be cleaned ({error}); check the network, the credentials and their "
            "rights, and run the same command again"
        ) from error


class _SharedStoreCleaner:
    """Removes old files of a shared store, and counts them."""

    def __init__(self, url: str, seconds: int, dry_run: bool) -> None:
        self.url, self.seconds, self.dry_run = url, seconds, dry_run
        self.objects = Objects(url)
        self.freed = 0
        self.gone: set[str] = set()

    def clean(self) -> Cleaned:
        """Remove old records, then old manifests and files that no record needs."""
        # Listed before the manifests are read, so that no file of a later upload is among them.
        unneeded = self._all("files")
        self._remove(self._all("records"))
        records = self._all("records")
        named = {
            f"manifests/{self._read_json(name, RECORD_BYTES).get('digest')}.json"
            for name in records
        }
        self._remove(self._all("manifests") - named)
        for name in self._all("manifests"):
            files = self._read_json(name, MANIFEST_BYTES).get("files")
            for file in files.values() if isinstance(files, dict) else ():
                if isinstance(file, dict):
                    unneeded.discard(f"files/{file.get('sha256')}")
        self._remove(unneeded)
        self._remove(self._all(PARTIAL_FOLDER))
        removed = sum(name.startswith("records/") for name in self.gone)
        return Cleaned(
            place=self.url,
            dry_run=self.dry_run,
            artifacts=removed,
            kept=len(records),
            bytes=self.freed,
        )

    def _all(self, folder: str) -> set[str]:
        """Return our files in a folder, without those that are removed, or would be."""
        ours = filter(OUR_NAMES[folder].fullmatch, self.objects.names(folder))
        return {f"{folder}/{name}" for name in ours} - self.gone

    def _remove(self, names: set[str]) -> None:
        """Remove files that are still old; some may have been written since they were listed."""
        for name in sorted(names):
            found = self.objects.look(name)
            if found and found.seconds > self.seconds:
                self.gone.add(name)
                self.freed += found.bytes
                if not self.dry_run:
                    self.objects.remove(name)

    def _read_json(self, name: str, limit: int) -> dict[str, Any]:
        """Return the content of a record or manifest; empty if it is unreadable."""
        try:
            content = json.loads(self.objects.read(name, limit) or b"")
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}


def _idle_seconds(*paths: Path) -> float:
    """Return the seconds since the last of some files was written; missing files do not count."""
    written = [0.0]
    for path in paths:
        with suppress(FileNotFoundError):
            written.append(path.stat().st_mtime)
    return time.time() - max(written)


def _sha256(file: Path) -> str | None:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None
