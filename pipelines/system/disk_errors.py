"""Disk troubles outside a stage's own work, in one line with the path and the remedy."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from compress.common.errors import CompressError, PipelineInvalid, StageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def readable_disk_errors(out: Path) -> Iterator[None]:
    """Turn the operating system's refusals into the toolkit's errors.

    Raises:
        PipelineInvalid: the directory of the results cannot be written.
        StageFailed: the disk is full, or fails otherwise.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise explain_disk_error(error, out) from error


def explain_disk_error(error: OSError, out: Path) -> CompressError:
    """Return the error that says what the operating system refused, and how to mend it."""
    path = error.filename or out
    if error.errno in FULL:
        folder = _nearest(Path(str(path)).absolute())
        free = shutil.disk_usage(folder).free >> 20
        return StageFailed(
            f"{path}: {error.strerror}; {free} MiB are free in {folder}; make room and run the "
            "same command again"
        )
    if error.errno in FORBIDDEN and _lies_in(path, out):
        return PipelineInvalid(
            f"{path}: cannot be written ({error.strerror}); mend its permissions, or choose "
            "another directory with --out"
        )
    return StageFailed(f"{path}: {error.strerror or error}")


def _nearest(path: Path) -> Path:
    """Return a path, or the innermost one above it, that is a directory."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _lies_in(path: object, folder: Path) -> bool:
    return os.path.abspath(str(path)).startswith(os.path.abspath(folder))  # noqa: PTH100 - as is
