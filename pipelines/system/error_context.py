"""Errors as one line: with a stage's name, or with the path and a remedy."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compress.common.errors import (
    DISK_FULL_ERRORS,
    CompressError,
    PipelineInvalid,
    StageFailed,
    first_line,
    raise_if_resources_ran_out,
)
from compress.pipelines.system.signals import only_signals_interrupt, raise_if_stopped

PERMISSION_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def readable_disk_errors(out: Path) -> Iterator[None]:
    """Turn OSErrors in a block into PipelineInvalid (results cannot be written) or StageFailed."""
    try:
        yield
    except OSError as error:
        raise _explain(error, out) from error


@contextmanager
def name_stage_in_errors(stage: str, out: Path) -> Iterator[None]:
    """Prefix errors within a block with a stage's name; one of another type becomes StageFailed."""
    try:
        with only_signals_interrupt():
            yield
    except CompressError as error:
        if str(error).startswith(f"{stage}: "):
            raise
        raise type(error)(f"{stage}: {error}") from error
    except OSError as error:
        known = _explain(error, out)
        raise type(known)(f"{stage}: {known}") from error
    except Exception as error:
        raise StageFailed(f"{stage}: {type(error).__name__}: {first_line(error)}") from error


def raise_unless_of_the_model(error: CompressError) -> None:
    """Raise an error again that says nothing of the model: after a signal, or of full resources."""
    raise_if_stopped()
    raise_if_resources_ran_out(error)


def _explain(error: OSError, out: Path) -> CompressError:
    path = error.filename or out
    if error.errno in DISK_FULL_ERRORS:
        place = Path(str(path)).absolute()
        folder = next(f for f in (place, *place.parents) if f.is_dir())
        free = shutil.disk_usage(folder).free >> 20
        return StageFailed(
            f"{path}: {error.strerror}; {free} MiB are free in {folder}; make room and run the "
            "same command again"
        )
    in_results = os.path.abspath(str(path)).startswith(os.path.abspath(out))  # noqa: PTH100 - as is
    if error.errno in PERMISSION_ERRORS and in_results:
        return PipelineInvalid(
            f"{path}: cannot be written ({error.strerror}); mend its permissions, or choose "
            "another directory with --out"
        )
    return StageFailed(f"{path}: {error.strerror or error}")
