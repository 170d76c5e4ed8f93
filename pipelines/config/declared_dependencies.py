"""Files and environment variables that a pipeline declares, as its results depend on them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from compress.common.dependency_recorder import Dependencies, digest_of, digest_of_variable
from compress.common.errors import PipelineInvalid

if TYPE_CHECKING:
    from pipelines.config.pipeline import PipelineConfig


def check_declared(pipeline: PipelineConfig) -> None:
    """Refuse files under `depends:` that do not exist.

    Raises:
        PipelineInvalid: one line with the place.
    """
    for index, name in enumerate(pipeline.depends.files):
        if not (pipeline.folder / name).exists():
            raise PipelineInvalid(
                f"{pipeline.place('depends', 'files', index)}: there is no {name!r} in "
                f"{pipeline.folder.absolute()}; paths are relative to the pipeline file"
            )


def declared_dependencies(pipeline: PipelineConfig) -> Dependencies:
    """Compute the digests of the files and variables that a pipeline declares under `depends:`."""
    files: dict[str, str | None] = {}
    for name in pipeline.depends.files:
        path = pipeline.folder / name
        in_folder = sorted(file for file in path.rglob("*") if file.is_file())
        for file in in_folder if path.is_dir() else [path]:
            files[os.path.relpath(file, pipeline.folder)] = digest_of(file)
    environment = {name: digest_of_variable(name) for name in pipeline.depends.environment}
    return Dependencies(files=files, environment=environment)
