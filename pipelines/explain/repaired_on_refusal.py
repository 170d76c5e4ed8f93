"""`compress run --repair`: on a refusal, tries repairs at once."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from compress.common.errors import CompressError, GateRefused
from compress.pipelines.terminal.console import current_mode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def repaired_on_refusal(directory: Path) -> Iterator[None]:
    """Try repairs where a gate refuses within the block, and raise the refusal all the same.

    The pipeline as it stands is refused, so the exit code says so; what passes is in
    `repair/pipeline.yaml`.
    """
    try:
        yield
    except GateRefused as refusal:
        # Importing it imports torch, which a run that passes has done by now.
        from compress.pipelines.explain.command import repair_and_print

        try:
            repair_and_print(directory, prints=not current_mode().as_json)
        except CompressError as error:
            refusal.add_note(f"repair: {error}")
        else:
            refusal.add_note(f"repair: what passes is in {directory / 'repair' / 'pipeline.yaml'}")
        raise
