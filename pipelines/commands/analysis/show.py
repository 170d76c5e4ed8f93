"""Runs an analysis of a pipeline's model, with progress, and prints what it found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.terminal.console import current_mode, print_result
from compress.pipelines.terminal.progress_bars import show_progress

if TYPE_CHECKING:
    from pathlib import Path


def show(analysis: Any, file: Path, out: Path | None, **options: Any) -> None:
    """Call `measure_and_write` of an analysis, a module of this package, and print its result."""
    pipeline = PipelineConfig.from_yaml(file)
    directory = out or pipeline.default_out
    with show_progress(quiet=current_mode().silent) as (progress, _):
        found = analysis.measure_and_write(pipeline, directory, progress=progress, **options)
    print_result(found, analysis.lines_below(found, directory), lambda _: analysis.table(found))
