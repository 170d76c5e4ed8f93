"""Files and environment variables that a pipeline declares, as its results depend on them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from compress.common.config import Settings
from compress.common.dependency_recorder import Dependencies, digest_of, digest_of_variable
from compress.common.errors import PipelineInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.config.pipeline import Pipeline


class Depends(Settings):
    """What results depend on beside what a run sees of itself."""

    files: tuple[str, ...] = ()
    """Files, or folders with all files in them, relative to this file; for what user code reads
    through a C extension or another process."""
    environment: tuple[Annotated[str, Field(pattern=r"^[^=]+$")], ...] = ()
    """Names of environment variables."""


def check_declared(pipeline: Pipeline) -> None:
    """Refuse files that are not there.

    Raises:
        PipelineInvalid: one line with the place.
    """
    for index, name in enumerate(pipeline.depends.files):
        if not (pipeline.folder / name).exists():
            raise PipelineInvalid(
                f"{pipeline.place('depends', 'files', index)}: there is no {name!r} in "
                f"{pipeline.folder.absolute()}; paths are relative to the pipeline file"
            )


def declared(pipeline: Pipeline) -> Dependencies:
    """Return digests of what a pipeline declares."""
    files: dict[str, str | None] = {}
    for name in pipeline.depends.files:
        for path in _files_in(pipeline.folder / name):
            files[os.path.relpath(path, pipeline.folder)] = digest_of(path)
    environment = {name: digest_of_variable(name) for name in pipeline.depends.environment}
    return Dependencies(files=files, environment=environment)


def _files_in(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())
