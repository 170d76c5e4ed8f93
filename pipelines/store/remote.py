"""A store that several machines share, at any URL that fsspec opens.

    URL/format.json              which layout this is
    URL/files/<sha256>           the files of artifacts, each named by its content
    URL/manifests/<digest>.json  which files an artifact has; its digest is this file's hash
    URL/records/<key>.json       which artifact a key stands for; written last

Readers do not see an incomplete upload, as its record is missing; writers of the same key do not
disturb each other; and every file that is read is compared with the hash in its name. Nothing is
opened in place: artifacts are fetched into a run's own store.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from compress.artifacts.artifact import MANIFEST, Artifact, replace_artifact, seal
from compress.common.atomic_files import partial_folder
from compress.common.errors import (
    ArtifactInvalid,
    CompressError,
    PipelineInvalid,
    Unavailable,
    first_line,
)
from compress.common.requirements import pip_install
from compress.pipelines.store.entry import FORMAT, FORMAT_FILE, Record, check_format
from compress.pipelines.system.jsonl_log import log_event

RECORD_BYTES, MANIFEST_BYTES, MAX_FILES = 2**24, 2**26, 10_000
"""Limits on bytes of a record, bytes of a manifest and number of files: far above real ones."""
SECONDS_TRUSTED = 86_400
"""Older files are uploaded again, not relied on: `compress gc` may be about to remove them."""
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci"}
"""Protocols whose objects appear only once they are complete, and which have no folders."""
PARTIAL_FOLDER = "partial"
"""Folder of incomplete files, for protocols whose files appear before they are complete."""
BYTES_READ_AT_ONCE, UPLOAD_PART_BYTES = 2**24, 2**23  # bytes that are read, and uploaded, at a time
MAX_UPLOAD_PARTS = 9_000  # S3 takes 10 000 parts of a file
TIME_KEYS = ("LastModified", "mtime", "last_modified", "updated", "modified", "created")
"""Names of the time when a file was written: of s3, files and sftp, Azure, Google, others."""
CREDENTIALS = re.compile(r"://[^@]*:[^@]*@|\?")  # a key's secret may hold slashes


class Remote:
    """A shared store in one run; if it fails, the run goes on without it, with a warning."""

    def __init__(self, url: str, announce: Callable[[str], None]) -> None:
        self._objects = Objects(url)
        self.url = url.rstrip("/")
        self._announce = announce
        self._replaced: set[str] = set()
        """Keys whose record is damaged or outdated: the new artifact is uploaded over it."""
        self._reads = self._writes = True

    def refuse_another_format(self) -> bool:
        """Return whether there is a store at the URL, with the first request to it."""
        try:
            content = self._objects.read(FORMAT_FILE, RECORD_BYTES)
        except Failed as error:
            raise self._refused("reached", error) from error
        if content is None:
            return False
        advice = "choose another, or remove it: everything in it can be made again"
        check_format(content, f"store {self.url}", advice)
        return True

    def begin(self, root: Path) -> None:
        """Create the store at the URL if there is none, for a run that holds its own store."""
        writer = f"{socket.gethostname()}:{root.absolute()}".encode()
        is_there = self.refuse_another_format()
        try:
            self._objects.take_over(_sha256(writer)[:16])
            if not is_there:
                self._objects.write(FORMAT_FILE, json.dumps({"format": FORMAT}).encode())
        except Failed as error:
            raise self._refused("written", error) from error

    def fetch(
        self, key: str, path: Path, outdated: Callable[[Record], str], *, downloads: bool = True
    ) -> tuple[Artifact, Record] | None:
        """Download the artifact of a key to a path; return None if it is missing or damaged.

        Also where `outdated` names something that user code read and that has changed. Without
        `downloads` no files are fetched. OSErrors of the local disk, not of the store, end the run.
        """
        try:
            found = self._read_record(key, path, outdated) if self._reads else None
            if found and downloads:
                self._download(found[0], found[2])
            return found and found[:2]
        except _Damaged as error:
            self._replaced.add(key)
            self._warn(f"{self.url}/{error}; it is refused, and made anew")
        except Failed as error:
            self._reads = self._writes = False
            self._warn(
                f"store {self.url}: cannot be reached any more ({error}); the run goes on "
                "without it"
            )
        return None

    def share(self, key: str, artifact: Artifact, record: Record) -> None:
        """Upload an artifact, and its record last, unless it is there already."""
        try:
            again = key in self._replaced
            if self._writes and (again or self._objects.look(f"records/{key}.json") is None):
                for name, file in artifact.manifest.files.items():
                    place = f"files/{file.sha256}"
                    found = self._objects.look(place)
                    same = found is not None and found.bytes == file.bytes
                    if again or not found or not same or found.seconds > SECONDS_TRUSTED:
                        self._objects.write(place, artifact.path / name)
                self._objects.write(f"manifests/{artifact.digest}.json", artifact.path / MANIFEST)
                # Measurements are not shared: each machine compares and measures for itself.
                self._objects.write(f"records/{key}.json", record.to_bytes())
                self._replaced.discard(key)
        except Failed as error:
            self._writes = False
            self._warn(
                f"store {self.url}: cannot be written ({error}); the run goes on and uploads "
                "nothing more; the same command uploads what is missing"
            )

    def _read_record(
        self, key: str, path: Path, outdated: Callable[[Record], str]
    ) -> tuple[Artifact, Record, bytes] | None:
        """Return an artifact without its files, its record, and the manifest's bytes."""
        place = f"records/{key}.json"
        content = self._objects.read(place, RECORD_BYTES)
        if content is None:
            return None
        try:
            record = Record.from_bytes(content, key)
        except ArtifactInvalid as error:
            raise _Damaged(place, str(error)) from None
        # It becomes a part of paths.
        if not re.fullmatch("[0-9a-f]{64}", record.digest):
            raise _Damaged(place, "names no artifact")
        if outdated(record):
            self._replaced.add(key)
            return None
        place = f"manifests/{record.digest}.json"
        raw = self._objects.read(place, MANIFEST_BYTES)
        if raw is None or _sha256(raw) != record.digest:
            raise _Damaged(place, "is missing" if raw is None else "is not what its name says")
        try:
            artifact: Artifact = Artifact.from_manifest(raw, path)
        except CompressError as error:
            raise _Damaged(place, first_line(error)) from None
        return artifact, record, raw

    def _download(self, artifact: Artifact, manifest: bytes) -> None:
        files, path = artifact.manifest.files, artifact.path
        path.parent.mkdir(parents=True, exist_ok=True)
        needed, free = sum(f.bytes for f in files.values()), shutil.disk_usage(path.parent).free
        # Before a byte is written: a forged manifest could fill the disk.
        if len(files) > MAX_FILES or needed > free:
            raise _Damaged(
                f"manifests/{artifact.digest}.json",
                f"names {len(files)} files of {needed} bytes; {MAX_FILES} and {free} are the "
                "limits",
            )
        with partial_folder(path) as partial:
            for name, file in files.items():
                place = f"files/{file.sha256}"
                found = self._objects.look(place)
                if found is None or found.bytes != file.bytes:
                    what = f"is {found.bytes} bytes, not {file.bytes}" if found else "is missing"
                    raise _Damaged(place, what)
                digest, left = hashlib.sha256(), file.bytes
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                with (partial / name).open("wb") as target:
                    for block in self._objects.blocks(place):
                        digest.update(block)
                        left -= len(block)
                        if left < 0:  # it grew meanwhile
                            break
                        target.write(block)
                if digest.hexdigest() != file.sha256:
                    raise _Damaged(place, "is not what its name says")
            (partial / MANIFEST).write_bytes(manifest)
            seal(partial)
            replace_artifact(partial, path)

    def _warn(self, what: str) -> None:
        self._announce(f"warning: {what}")
        log_event("message", what, level="warning")

    def _refused(self, what: str, error: Failed) -> PipelineInvalid:
        return PipelineInvalid(
            f"store {self.url}: cannot be {what} ({error}); check the URL, the network, the "
            "credentials and their rights, or run without a shared store"
        )


class _Damaged(Exception):
    """A file of the store does not have the content that its name or manifest says."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(f"{place}: {what}")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Failed(Exception):
    """The storage service did not answer, or with an error, which is the message."""


class Missing(Failed):
    """The storage service says that there is no such file."""


class StoredFile(NamedTuple):
    """A file at a URL."""

    bytes: int
    seconds: float
    """Since it was written; 0 if the service does not say when."""


class Objects:
    """The files below a URL, by names such as ``files/1f…``; requests that fail raise Failed.

    Raises PipelineInvalid: an unknown URL, or with credentials; Unavailable: lacks its package.
    """

    def __init__(self, url: str) -> None:
        if CREDENTIALS.search(url):
            raise PipelineInvalid(
                "store: the URL holds a password or a signature, which reports and logs would "
                "show; give credentials where the protocol's package looks for them (s3: "
                "AWS_PROFILE, AWS_ACCESS_KEY_ID …; any: fsspec's configuration)"
            )
        try:
            from fsspec.core import url_to_fs

            # Other machines write to it: a cached listing would hide their files.
            self._files, root = url_to_fs(url, use_listings_cache=False)
        except ImportError as error:
            raise Unavailable(
                f"store {url}: {first_line(error)}; for s3: {pip_install('remote')}"
            ) from error
        except Exception as error:
            raise PipelineInvalid(
                f"store {url}: {first_line(error)}; expected a URL such as s3://bucket/folder or "
                "file:///folder"
            ) from error
        self._root = root.rstrip("/")
        protocol = self._files.protocol
        protocols = {protocol} if isinstance(protocol, str) else {*protocol}
        self._renames = not protocols & OBJECT_STORES
        self._in_parts = "s3" in protocols
        self._writer = uuid.uuid4().hex

    def take_over(self, writer: str) -> None:
        """Write under a name of its own, and remove incomplete files of that name."""
        self._writer = writer
        for name in self.names(PARTIAL_FOLDER) if self._renames else ():
            if name.startswith(writer):
                self.remove(f"{PARTIAL_FOLDER}/{name}")

    def names(self, folder: str) -> list[str]:
        """List the names directly in a folder; none if it does not exist."""
        try:
            with _fsspec_errors():
                found = self._files.ls(self._path(folder), detail=False)
        except Missing:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its content; nothing if it is gone already."""
        with suppress(Missing), _fsspec_errors():
            self._files.rm(self._path(name), recursive=True)

    def read(self, name: str, limit: int) -> bytes | None:
        """Return a small file's bytes, at most one beyond the limit; None if it does not exist."""
        try:
            with _fsspec_errors():
                content: bytes = self._files.cat_file(self._path(name), start=0, end=limit + 1)
                return content
        except Missing:
            return None

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield a file's bytes, block by block."""
        with (
            _fsspec_errors(),
            self._files.open(self._path(name), "rb", block_size=BYTES_READ_AT_ONCE) as stream,
        ):
            while block := stream.read(BYTES_READ_AT_ONCE):
                yield block

    def look(self, name: str) -> StoredFile | None:
        """Return the size and age of a file; None if it does not exist."""
        try:
            with _fsspec_errors():
                info = self._files.info(self._path(name))
                written = next((info[key] for key in TIME_KEYS if info.get(key)), None)
                if isinstance(written, str):
                    written = datetime.fromisoformat(written)
                elif isinstance(written, int | float):
                    written = datetime.fromtimestamp(written, UTC)
                seconds = 0.0
                if isinstance(written, datetime):
                    written = written.replace(tzinfo=written.tzinfo or UTC)
                    seconds = (datetime.now(UTC) - written).total_seconds()
                return StoredFile(int(info["size"] or 0), seconds)
        except Missing:
            return None

    def write(self, name: str, content: bytes | Path) -> None:
        """Write a file from bytes or a local file; readers never see an incomplete one."""
        target = self._path(name)
        partial = f"{PARTIAL_FOLDER}/{self._writer}-{uuid.uuid4().hex}"
        upload = self._path(partial) if self._renames else target
        with _fsspec_errors():
            if self._renames:
                for path in (upload, target):
                    self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            if isinstance(content, bytes):
                self._files.pipe_file(upload, content)
            else:
                size = max(UPLOAD_PART_BYTES, content.stat().st_size // MAX_UPLOAD_PARTS)
                # s3fs holds ten parts at once, and would make them of 50 MiB.
                parts = {"chunksize": size} if self._in_parts else {}
                self._files.put_file(str(content), upload, **parts)
            if self._renames:
                self._files.mv(upload, target)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


@contextmanager
def _fsspec_errors() -> Iterator[None]:
    """Turn the exceptions of any protocol's package into `Missing` and `Failed`."""
    try:
        yield
    except Exception as error:
        kind = Missing if isinstance(error, FileNotFoundError) else Failed
        raise kind(f"{type(error).__name__}: {first_line(error)[:200]}") from error
