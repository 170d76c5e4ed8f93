"""Errors of a stage as one line that starts with the stage's name."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from compress.common.errors import CompressError, StageFailed, first_line
from pipelines.system.disk_errors import explain_disk_error
from pipelines.system.signals import only_signals_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def name_stage_in_errors(stage: str, out: Path) -> Iterator[None]:
    """Prefix errors within a block with a stage's name.

    Args:
        stage: its name.
        out: directory of the results.

    Raises:
        CompressError: for any error; one of another type becomes StageFailed.
    """
    try:
        with only_signals_interrupt():
            yield
    except CompressError as error:
        if str(error).startswith(f"{stage}: "):
            raise
        raise type(error)(f"{stage}: {error}") from error
    except OSError as error:
        known = explain_disk_error(error, out)
        raise type(known)(f"{stage}: {known}") from error
    except Exception as error:
        raise StageFailed(f"{stage}: {type(error).__name__}: {first_line(error)}") from error
