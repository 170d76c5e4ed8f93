"""Writing files so that a crash leaves the old content or the new, never half of it."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from typing import TYPE_CHECKING

from compress.common.errors import ArtifactInvalid

if TYPE_CHECKING:
    from io import BufferedReader
    from pathlib import Path

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of renameat2(2)."""
PARTIAL, REMOVED = ".partial-", ".removed-"
"""Marks in the hidden names of what is being made and removed; a process's number follows."""
IRREGULAR = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFSOCK: "a socket",
}


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write under a temporary name, sync, and rename over the old file."""
    content = content.encode() if isinstance(content, str) else content
    try:
        _write(path, content)
    except FileNotFoundError:  # a run that began here swept it up, which it does once
        _write(path, content)


def _write(path: Path, content: bytes) -> None:
    partial = partial_path(path)
    try:
        partial.write_bytes(content)
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def partial_path(path: Path) -> Path:
    """Return the name under which this process makes what then gets a name of its own."""
    return path.with_name(f".{path.name}{PARTIAL}{os.getpid()}")


def remove(folder: Path) -> None:
    """Remove a directory, if it is there, so that a crash leaves the whole of it or none.

    Of a link to a directory the link goes.
    """
    aside = folder.with_name(f".{folder.name}{REMOVED}{os.getpid()}")
    _remove_now(aside)
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return
    _remove_now(aside)  # what another process still writes there is swept up


def replace(new: Path, folder: Path) -> None:
    """Put a directory in the place of another, so that a crash leaves the old one or the new."""
    try:
        _exchange(new, folder)
    except FileNotFoundError:  # there is no old one
        new.rename(folder)
    except OSError:  # the file system cannot exchange names
        remove(folder)
        new.rename(folder)
    else:
        remove(new)


def _exchange(one: Path, other: Path) -> None:
    """Exchange the names of two directories in one step."""
    import ctypes

    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc's, of Linux
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))


def remove_leftovers(folder: Path, names: str = "*") -> None:
    """Remove what a crash left half made or half removed directly in a directory.

    What of a folder cannot be removed stays. Nobody else may write such names there meanwhile.

    Args:
        folder: the directory.
        names: pattern of the names that were to be made or removed.
    """
    for mark in (PARTIAL, REMOVED):
        for left in folder.glob(f".{names}{mark}*"):
            if left.name.rpartition(mark)[2].isdigit():  # or it is not ours
                _remove_now(left)


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


def stays_inside(name: str) -> bool:
    """Whether a name, its parts set apart by slashes, is that of a file below a folder."""
    parts = name.split("/")
    plain = "\\" not in name and "\0" not in name and not {"", ".", ".."} & {*parts}
    return plain and all(len(part.encode()) <= 255 for part in parts)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def open_regular(path: Path, *, follow_link: bool = True) -> BufferedReader:
    """Open a regular file for reading.

    Opening a pipe waits for its writer, and a device such as /dev/zero has no end; neither is read.

    Args:
        path: the file.
        follow_link: whether the last part of the path may be a symbolic link.

    Raises:
        ArtifactInvalid: it is a pipe or a device, or a link that is not followed.
        OSError: it is missing or a directory, or may not be read.
    """
    if not follow_link and path.is_symlink():
        raise ArtifactInvalid(f"{path}: is a symbolic link, expected a regular file")
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


def refuse_irregular(path: Path, mode: int | None = None) -> None:
    """Refuse what is no regular file, before a library opens it by its name.

    Args:
        path: the file; where it is missing, its reader says so.
        mode: its type and permissions where they are known, so that links are not followed.

    Raises:
        ArtifactInvalid: it is a pipe, a device, a directory or a link.
    """
    if mode is None:
        try:
            mode = path.stat().st_mode
        except OSError:
            return
    if not stat.S_ISREG(mode):
        kind = IRREGULAR.get(stat.S_IFMT(mode), "a device")
        raise ArtifactInvalid(f"{path}: is {kind}, expected a regular file")
