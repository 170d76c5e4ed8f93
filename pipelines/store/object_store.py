"""Files at a URL, of any protocol that fsspec knows: read within limits, written whole or not."""

from __future__ import annotations

import re
import uuid
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from compress.common.errors import PipelineInvalid, Unavailable, first_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci"}
"""Where an object is there when it is whole, and not before; there are no folders either."""
PARTIAL = "partial"
"""Folder of what is being written, where objects are not whole when they appear."""
BLOCK, PART = 2**24, 2**23
"""Bytes that are read, and uploaded, at a time."""
MOST_PARTS = 9_000
"""S3 takes 10 000 parts of a file."""
WRITTEN = ("LastModified", "mtime", "last_modified", "updated", "modified", "created")
"""Names of the time when a file was written: of s3, files and sftp, Azure, Google, others."""
CREDENTIALS = re.compile(r"://[^@]*:[^@]*@|\?")  # a key's secret may hold slashes


class Failed(Exception):
    """The other side could not be asked; with what it said."""


class Missing(Failed):
    """The other side says that there is no such file."""


class Found(NamedTuple):
    """A file at a URL."""

    bytes: int
    seconds: float
    """Since it was written; 0 where the other side does not tell."""


class Objects:
    """What lies below a URL, by names such as ``files/1f…``."""

    def __init__(self, url: str) -> None:
        """Open a URL without asking it anything.

        Raises:
            PipelineInvalid: no URL that fsspec knows, or one that holds credentials.
            Unavailable: the package for its protocol is not installed.
        """
        self._files, self._root = _opened(url)
        protocol = self._files.protocol
        protocols = {protocol} if isinstance(protocol, str) else {*protocol}
        self._renames = not protocols & OBJECT_STORES
        self._in_parts = "s3" in protocols
        self._writer = uuid.uuid4().hex

    def take_over(self, writer: str) -> None:
        """Go on as a writer that nobody else is, and remove what it left half written.

        Raises:
            Failed: the other side.
        """
        self._writer = writer
        for name in self.names(PARTIAL) if self._renames else ():
            if name.startswith(writer):
                self.remove(f"{PARTIAL}/{name}")

    def names(self, folder: str) -> list[str]:
        """Return the names of what lies directly in a folder; none where it is not there.

        Raises:
            Failed: the other side.
        """
        try:
            with _asking():
                found = self._files.ls(self._path(folder), detail=False)
        except Missing:
            return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it, which may be gone by now.

        Raises:
            Failed: the other side.
        """
        with suppress(Missing), _asking():
            self._files.rm(self._path(name), recursive=True)

    def read(self, name: str, limit: int) -> bytes | None:
        """Return a small file's bytes, at most one more than the limit; None where it is not there.

        Raises:
            Failed: the other side.
        """
        try:
            with _asking():
                content: bytes = self._files.cat_file(self._path(name), start=0, end=limit + 1)
                return content
        except Missing:
            return None

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield a file's bytes, block by block.

        Raises:
            Failed: the other side.
        """
        with _asking(), self._files.open(self._path(name), "rb", block_size=BLOCK) as stream:
            while block := stream.read(BLOCK):
                yield block

    def look(self, name: str) -> Found | None:
        """Return how large and old a file is; None where it is not there.

        Raises:
            Failed: the other side.
        """
        try:
            with _asking():
                info = self._files.info(self._path(name))
                return Found(int(info["size"] or 0), _seconds_since(info))
        except Missing:
            return None

    def write(self, name: str, content: bytes | Path) -> None:
        """Write a file, from bytes or a local one, so that nobody sees a half of it.

        Raises:
            Failed: the other side.
        """
        target = self._path(name)
        partial = f"{PARTIAL}/{self._writer}-{uuid.uuid4().hex}"
        first = self._path(partial) if self._renames else target
        with _asking():
            if self._renames:
                for path in (first, target):
                    self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            if isinstance(content, bytes):
                self._files.pipe_file(first, content)
            else:
                size = max(PART, content.stat().st_size // MOST_PARTS)
                # s3fs holds ten parts at once, and would make them of 50 MiB.
                parts = {"chunksize": size} if self._in_parts else {}
                self._files.put_file(str(content), first, **parts)
            if self._renames:
                self._files.mv(first, target)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


@contextmanager
def _asking() -> Iterator[None]:
    """Turn what a protocol's package raises, each its own, into one error."""
    try:
        yield
    except FileNotFoundError as error:
        raise Missing(_error_summary(error)) from error
    except Exception as error:
        raise Failed(_error_summary(error)) from error


def _seconds_since(info: dict[str, Any]) -> float:
    """Return how old a file is, by whichever name a protocol's package has for its time."""
    written = next((info[name] for name in WRITTEN if info.get(name)), None)
    if isinstance(written, str):
        written = datetime.fromisoformat(written)
    if isinstance(written, int | float):
        written = datetime.fromtimestamp(written, UTC)
    if not isinstance(written, datetime):
        return 0.0
    return (datetime.now(UTC) - written.replace(tzinfo=written.tzinfo or UTC)).total_seconds()


def _error_summary(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)[:200]}"


def _opened(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    if CREDENTIALS.search(url):
        raise PipelineInvalid(
            "store: the URL holds a password or a signature, which reports and logs would show; "
            "give credentials where the protocol's package looks for them (s3: AWS_PROFILE, "
            "AWS_ACCESS_KEY_ID …; any: fsspec's configuration)"
        )
    try:
        from fsspec.core import url_to_fs

        files, root = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise Unavailable(
            f"store {url}: {first_line(error)}; for s3: pip install 'compress-pipeline[remote]'"
        ) from error
    except Exception as error:
        raise PipelineInvalid(
            f"store {url}: {first_line(error)}; expected a URL such as s3://bucket/folder or "
            "file:///folder"
        ) from error
    return files, root.rstrip("/")
