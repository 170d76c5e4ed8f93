"""Removes artifacts that have not been used for long, from a run's store or a shared one."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from compress.artifacts.artifact import MANIFEST
from compress.common.atomic_files import remove, sha256_if_readable
from compress.common.config import Settings
from compress.common.errors import PipelineInvalid
from compress.pipelines.store import remote
from compress.pipelines.store.entry import RECORD
from compress.pipelines.store.local import WORK, Store, store_lock
from compress.pipelines.system.error_context import readable_disk_errors

SECONDS_OF_UNIT = {"h": 3600, "d": 86_400, "w": 604_800}
MIN_SHARED_SECONDS = 2 * remote.SECONDS_TRUSTED
"""Seconds. Half of it is the age up to which an upload relies on files that are there."""
KEY_PATTERN = re.compile("[0-9a-f]{32}")
OUR_NAMES = {
    "files": re.compile("[0-9a-f]{64}"),
    "manifests": re.compile(r"[0-9a-f]{64}\.json"),
    "records": re.compile(r"[0-9a-f]{32}\.json"),
    remote.PARTIAL_FOLDER: re.compile("[0-9a-f]{16,32}-[0-9a-f]{32}"),
}
"""Names in a shared store's folders that are ours; other files are left alone."""


class Cleaned(Settings):
    """What was removed, or would be."""

    place: str
    dry_run: bool
    artifacts: int
    kept: int
    bytes: int

    def lines(self) -> Iterator[str]:
        """Yield the result in words."""
        words = "would be removed, which would free" if self.dry_run else "removed, which freed"
        noun = "artifact" if self.artifacts == 1 else "artifacts"
        freed = f"{self.bytes / 2**20:.1f} MiB"
        yield f"{self.place}: {self.artifacts} {noun} {words} {freed}; {self.kept} stay"


def clean(place: str, older_than: str, dry_run: bool, announce: Callable[[str], None]) -> Cleaned:
    """Remove what was not used for some time, of a run or a shared store; announce a wait."""
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
        shown = {sha256_if_readable(file) for file in out.glob(f"artifacts/*/{MANIFEST}")} - {None}
        folders = [folder for folder in root.iterdir() if KEY_PATTERN.fullmatch(folder.name)]
        entries = [folder for folder in folders if (folder / RECORD).exists()]
        old = [
            folder
            for folder in entries
            if _idle_seconds(folder / RECORD, folder) > seconds
            and sha256_if_readable(folder / "artifact" / MANIFEST) not in shown
        ]
        begun = (*(root / WORK).glob("*"), *(f for f in folders if f not in entries))
        # All files: writing one does not change the time of a folder further up.
        work = [f for f in begun if _idle_seconds(*f.rglob("*"), f) > seconds]
        paths = (path for folder in (*old, *work) for path in folder.rglob("*"))
        stats = [path.lstat() for path in paths if not path.is_dir()]
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
    if not remote.Remote(url, lambda _: None).refuse_another_format():
        raise PipelineInvalid(f"{url}: there is no store")
    objects, gone, freed = remote.Objects(url), set[str](), 0

    def ours(folder: str) -> set[str]:
        """Return our files in a folder, without those that are removed, or would be."""
        names = filter(OUR_NAMES[folder].fullmatch, objects.names(folder))
        return {f"{folder}/{name}" for name in names} - gone

    def remove_old(names: set[str]) -> None:
        """Remove files that are still old; some may have been written since they were listed."""
        nonlocal freed
        for name in sorted(names):
            found = objects.look(name)
            if found and found.seconds > seconds:
                gone.add(name)
                freed += found.bytes
                if not dry_run:
                    objects.remove(name)

    def read_json(name: str, limit: int) -> dict[str, Any]:
        """Return the content of a record or manifest; empty if it is unreadable."""
        with suppress(ValueError):
            content = json.loads(objects.read(name, limit) or b"")
            return content if isinstance(content, dict) else {}
        return {}

    try:
        # Listed before the manifests are read, so that no file of a later upload is among them.
        unneeded = ours("files")
        remove_old(ours("records"))
        records = ours("records")
        digests = (read_json(name, remote.RECORD_BYTES).get("digest") for name in records)
        remove_old(ours("manifests") - {f"manifests/{digest}.json" for digest in digests})
        for name in ours("manifests"):
            files = read_json(name, remote.MANIFEST_BYTES).get("files")
            for file in files.values() if isinstance(files, dict) else ():
                if isinstance(file, dict):
                    unneeded.discard(f"files/{file.get('sha256')}")
        remove_old(unneeded)
        remove_old(ours(remote.PARTIAL_FOLDER))
    except remote.Failed as error:
        raise PipelineInvalid(
            f"{url}: cannot be cleaned ({error}); check the network, the credentials and their "
            "rights, and run the same command again"
        ) from error
    removed = sum(name.startswith("records/") for name in gone)
    return Cleaned(place=url, dry_run=dry_run, artifacts=removed, kept=len(records), bytes=freed)


def _idle_seconds(*paths: Path) -> float:
    """Return the seconds since the last of some files was written; missing files do not count."""
    written = [0.0]
    for path in paths:
        with suppress(FileNotFoundError):
            written.append(path.stat().st_mtime)
    return time.time() - max(written)
