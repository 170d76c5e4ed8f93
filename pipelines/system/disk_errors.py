"""Errors of the file system as one line with the path and a remedy."""

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
    """Turn OSErrors within a block into the toolkit's errors.

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
    """Translate an OSError into an error that names the path and a remedy."""
    path = error.filename or out
    if error.errno in FULL:
        folder = _nearest_directory(Path(str(path)).absolute())
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


def _nearest_directory(path: Path) -> Path:
    """Return the nearest existing directory at or above a path."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _lies_in(path: object, folder: Path) -> bool:
    return os.path.abspath(str(path)).startswith(os.path.abspath(folder))  # noqa: PTH100 - as is
