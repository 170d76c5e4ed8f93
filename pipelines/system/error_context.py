"""Whatever a stage's work raises, in one line that names the stage."""

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
    """Let errors within a block name a stage.

    Args:
        stage: its name.
        out: directory of the results.

    Raises:
        CompressError: so it was, or whatever else was raised, as one.
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
