"""Files at a URL of any fsspec protocol: read up to a limit, and written atomically."""

from __future__ import annotations

import re
import uuid
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from compress.common.errors import PipelineInvalid, Unavailable, first_line
from compress.common.requirements import pip_install

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci"}
"""Protocols whose objects appear only once they are complete, and which have no folders."""
PARTIAL = "partial"
"""Folder of incomplete files, for protocols whose files appear before they are complete."""
BLOCK, PART = 2**24, 2**23
"""Bytes that are read, and uploaded, at a time."""
MOST_PARTS = 9_000
"""S3 takes 10 000 parts of a file."""
WRITTEN = ("LastModified", "mtime", "last_modified", "updated", "modified", "created")
"""Names of the time when a file was written: of s3, files and sftp, Azure, Google, others."""
CREDENTIALS = re.compile(r"://[^@]*:[^@]*@|\?")  # a key's secret may hold slashes


class Failed(Exception):
    """The storage service did not answer, or with an error, which is the message."""


class Missing(Failed):
    """The storage service says that there is no such file."""


class Found(NamedTuple):
    """A file at a URL."""

    bytes: int
    seconds: float
    """Since it was written; 0 if the service does not say when."""


class Objects:
    """The files below a URL, by names such as ``files/1f…``.

    Raises:
        PipelineInvalid: no URL that fsspec knows, or one that holds credentials.
        Unavailable: the package for its protocol is not installed.
        Failed: from any method: its request failed.
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
        for name in self.names(PARTIAL) if self._renames else ():
            if name.startswith(writer):
                self.remove(f"{PARTIAL}/{name}")

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
            self._files.open(self._path(name), "rb", block_size=BLOCK) as stream,
        ):
            while block := stream.read(BLOCK):
                yield block

    def look(self, name: str) -> Found | None:
        """Return the size and age of a file; None if it does not exist."""
        try:
            with _fsspec_errors():
                info = self._files.info(self._path(name))
                written = next((info[key] for key in WRITTEN if info.get(key)), None)
                if isinstance(written, str):
                    written = datetime.fromisoformat(written)
                elif isinstance(written, int | float):
                    written = datetime.fromtimestamp(written, UTC)
                seconds = 0.0
                if isinstance(written, datetime):
                    written = written.replace(tzinfo=written.tzinfo or UTC)
                    seconds = (datetime.now(UTC) - written).total_seconds()
                return Found(int(info["size"] or 0), seconds)
        except Missing:
            return None

    def write(self, name: str, content: bytes | Path) -> None:
        """Write a file from bytes or a local file; readers never see an incomplete one."""
        target = self._path(name)
        partial = f"{PARTIAL}/{self._writer}-{uuid.uuid4().hex}"
        upload = self._path(partial) if self._renames else target
        with _fsspec_errors():
            if self._renames:
                for path in (upload, target):
                    self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            if isinstance(content, bytes):
                self._files.pipe_file(upload, content)
            else:
                size = max(PART, content.stat().st_size // MOST_PARTS)
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
    except FileNotFoundError as error:
        raise Missing(_error_summary(error)) from error
    except Exception as error:
        raise Failed(_error_summary(error)) from error


def _error_summary(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:200]}"
