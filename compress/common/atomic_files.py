"""Writes, replaces and removes files so that a crash leaves the old content or the new."""

from __future__ import annotations

import atexit
import errno
import fcntl
import glob
import hashlib
import itertools
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from compress.common.counts import count
from compress.common.errors import ArtifactInvalid, first_line

PARTIAL, REMOVED = ".partial-", ".removed-"
"""In hidden names of files that are being written or removed, before numbers that no other thread
or process has: `1234-0`."""
RACY_SECONDS = 2.0
"""A file changed this recently may change again without a new mtime; its digest is not cached."""
_digests: dict[Path, tuple[tuple[int, ...], str]] = {}
"""File → device, inode, size and times, and its digest: a cache."""
NUMBERS = re.compile(r"\d+(-\d+)?")  # one number in names of earlier versions
IRREGULAR = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFSOCK: "a socket",
}


def user_cache_folder() -> Path:
    """Return where this user's runs keep what others may use again; it may be missing."""
    # Not `Path.home()`, which raises where there is no home.
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(base) / "compress-pipeline"


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write under a temporary name, sync, and rename over the old file."""
    with open_atomically(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """Yield a file under a temporary name, which is synced and renamed at the end of the block."""
    remove_leftovers(path.parent, glob.escape(path.name))
    partial, lock = create_locked(lambda: _hidden_path(path, PARTIAL), Path.touch)
    try:
        with partial.open("wb") as stream:
            yield stream
        sync(partial)  # before the rename, or a power cut leaves an empty file under the final name
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)
        os.close(lock)


@contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """Yield a new hidden folder, to be renamed to a path beside it; else it is removed in the end.

    Those that killed processes left for the same path are removed. A folder that is created to hold
    it does not stay empty.
    """
    is_new = not path.parent.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, glob.escape(path.name))
    partial, lock = create_locked(lambda: _hidden_path(path, PARTIAL), Path.mkdir)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)
        if is_new:
            with suppress(OSError):  # it holds what was renamed
                path.parent.rmdir()


def create_locked(
    new_path: Callable[[], Path], create: Callable[[Path], object]
) -> tuple[Path, int]:
    """Create a file or folder; return it and a descriptor that locks it until this process dies.

    Args:
        new_path: Returns a name that nothing has had. It is asked again where another process
            removed what it took for a leftover: a second one may be about to remove the same name.
        create: Creates it.
    """
    while True:
        path = new_path()
        create(path)
        with suppress(FileNotFoundError):  # another process removed it before it was locked
            # NFS locks no folder, and no file that is only read.
            lock = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if path.exists():
                return path, lock
            os.close(lock)


def temporary_folder() -> Path:
    """Return a new folder that is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="compress-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def remove(folder: Path) -> None:
    """Remove a directory, or a link to one, if it exists; a crash leaves all of it or nothing."""
    aside = _hidden_path(folder, REMOVED)
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return
    _remove_now(aside)  # with what another process still writes there


def replace(new: Path, folder: Path) -> None:
    """Replace a directory by another; a crash leaves the old one or the new."""
    while True:
        try:
            _exchange(new, folder)
        except FileNotFoundError:  # there is no old one
            pass
        except OSError:  # the file system cannot exchange names
            remove(folder)
        else:
            remove(new)
            return
        try:
            new.rename(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # else another thread put its own there meanwhile
        else:
            return


def _exchange(one: Path, other: Path) -> None:
    import ctypes

    at_fdcwd, rename_exchange = -100, 2  # of renameat2(2)
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc's, of Linux
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))


def remove_leftovers(folder: Path, names: str = "*") -> None:
    """Remove what killed processes left half written or half removed directly in a directory.

    ``names`` is a pattern of the final names.
    """
    for mark in (PARTIAL, REMOVED):
        for left in folder.glob(f".{names}{mark}*"):
            if NUMBERS.fullmatch(left.name.rpartition(mark)[2]):  # else it is a user's file
                remove_unlocked(left)


def remove_unlocked(path: Path) -> None:
    """Remove a file or folder, unless a live process has locked it or it belongs to others."""
    with suppress(OSError):
        if path.is_symlink():
            path.unlink()
        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Its owner may have made it anew, and locked that, since it was opened.
            if os.path.samestat(os.fstat(lock), path.lstat()):
                _remove_now(path)
        os.close(lock)


def _remove_now(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden_path(path: Path, mark: str) -> Path:
    """Return a new hidden name beside a path; two threads may write or remove the same one."""
    while True:
        hidden = path.with_name(f".{path.name}{mark}{os.getpid()}-{next(_serial)}")
        if not os.path.lexists(hidden):  # else a killed process had the number of this one
            return hidden


_serial = itertools.count()


def stays_inside(name: str) -> bool:
    """Whether a relative path with slashes stays below its folder and has valid names."""
    parts = name.split("/")
    # Windows and some unzippers take a backslash for a slash; C code ends a name at a null byte;
    # JSON may hold half of a surrogate pair, which is no character.
    odd = re.search("[\\\\\0\ud800-\udfff]", name)
    plain = not odd and not {"", ".", ".."} & {*parts}
    return plain and all(len(part.encode()) <= 255 for part in parts)  # NAME_MAX of Linux


def file_beside(file: Path, name: object) -> Path:
    """Return the path of the file that another one names in its own folder.

    Raises:
        ArtifactInvalid: it is no plain name, or a link that leads out of the folder.
    """
    if not isinstance(name, str) or "/" in name:
        raise ArtifactInvalid(f"{file}: names {name!r}, expected a file beside it")
    return file_below(file, name)


def file_below(file: Path, name: str) -> Path:
    """Return the path of the file that another one names in its own folder, or below it.

    Raises:
        ArtifactInvalid: it is no path below the folder, or is a link that leads out of it.
    """
    if not stays_inside(name):
        raise ArtifactInvalid(f"{file}: names {name!r}, expected a file beside it")
    path, folder = file.parent / name, file.parent.resolve()
    # A snapshot in Hugging Face's cache is a folder of links to the blobs beside all snapshots.
    snapshots = (p.parent for p in (folder, folder.parent) if p.parent.name == "snapshots")
    allowed = [folder, *(each.with_name("blobs") for each in snapshots)]
    try:
        target = path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise ArtifactInvalid(f"{path}: {first_line(error)}") from error
    if not any(target.is_relative_to(each) for each in allowed):
        raise ArtifactInvalid(
            f"{path}: is a link that leads out of its folder, to {target}; put the file there"
        )
    return path


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file."""
    with open_regular(path) as stream:
        count("hashed.bytes", os.fstat(stream.fileno()).st_size)
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sha256_if_readable(path: Path) -> str | None:
    """Return the SHA-256 of a regular file, or None where it cannot be read."""
    with suppress(OSError, ArtifactInvalid):
        return sha256_of(path)
    return None


def sha256_while_unchanged(path: Path) -> str:
    """Return a regular file's SHA-256, hashed again only once inode, size or times have changed.

    For what is compared with an earlier run. What is loaded is hashed right before.
    """
    found = path.stat()
    identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    known = _digests.get(path)
    if known and known[0] == identity:
        return known[1]
    digest = sha256_of(path)
    if time.time() - found.st_ctime > RACY_SECONDS:
        _digests[path] = identity, digest
    return digest


def open_regular(path: Path, *, follow_link: bool = True) -> BufferedReader:
    """Open a regular file for reading; ``follow_link`` is about the last part of its path.

    ArtifactInvalid for a pipe or a device, or a link that is not followed; else OSError.
    """
    if not follow_link and path.is_symlink():
        raise ArtifactInvalid(f"{path}: is a symbolic link, expected a regular file")
    # Opening a pipe would wait for its writer. The link is refused here once more, as the path may
    # have become one since; and the mode is that of the open file (a device has no end).
    more = os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW)
    stream = open(  # noqa: SIM115 - the caller closes it
        path, "rb", opener=lambda name, flags: os.open(name, flags | more)
    )
    try:
        refuse_irregular(path, os.fstat(stream.fileno()).st_mode)
    except ArtifactInvalid:
        stream.close()
        raise
    return stream


def read_regular(path: Path, most: int) -> bytes:
    """Return a regular file's content; ArtifactInvalid for another file, or more bytes."""
    with open_regular(path) as stream:  # a pipe or a device could hold it up, or have no end
        content = stream.read(most + 1)
    if len(content) > most:
        raise ArtifactInvalid(f"{path}: has more than {most} bytes")
    return content


def refuse_irregular(path: Path, mode: int | None = None) -> None:
    """Raise ArtifactInvalid for anything but a regular file, before a library opens it by name.

    With its ``st_mode``, if known, links are not followed.
    """
    if mode is None:
        try:
            mode = path.stat().st_mode
        except OSError:
            return  # its reader reports a missing file
    if not stat.S_ISREG(mode):
        kind = IRREGULAR.get(stat.S_IFMT(mode), "a device")
        raise ArtifactInvalid(f"{path}: is {kind}, expected a regular file")
