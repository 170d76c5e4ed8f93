"""The model that the first `prune_channels` of a pipeline reads, for analyses of it."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.artifacts.eager_model import EagerModel
from compress.common.errors import StageFailed
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.runner.inputs import import_source, measuring_context
from compress.pipelines.runner.run import preview_state
from compress.pipelines.system.temp_files import temporary_files
from compress.pipelines.terminal.console import current_mode, print_result, show_progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.progress import Progress
    from compress.pruning.prune_channels import PruneChannels


@contextmanager
def model_to_prune(
    pipeline: PipelineConfig, out: Path, progress: Progress
) -> Iterator[tuple[EagerModel, PruneChannels | None, Context]]:
    """Provide the input of the first `prune_channels`, that stage, and a context to measure in.

    Without such a stage it is the imported model, and None. Earlier models are in the results'
    directory `out`.
    """
    plan, pipeline, context = measuring_context(pipeline, out / "variants", progress)
    planned = next((p for p in plan.stages if p.stage.stage == "prune_channels"), None)
    name = planned.input if planned else SOURCE
    with temporary_files(), tempfile.TemporaryDirectory() as folder:
        model: Artifact
        if planned is None or name == SOURCE:
            model = import_source(pipeline, Path(folder) / SOURCE)
        else:
            actions, state = preview_state(pipeline, out, RunOptions(until=name))
            if name not in state.artifacts:
                raise StageFailed(
                    f"{planned.name} reads {name!r}, which is not made yet ({actions[name]}); "
                    f"first: compress run {pipeline.file} --out {out} --until {name}"
                )
            model = state.artifacts[name]
        if not isinstance(model, EagerModel):
            raise StageFailed(f"{name!r} is a {model.kind!r} artifact, expected an eager model")
        context = context.with_root(model.path.with_name("variants"))
        yield model, planned.stage if planned else None, context  # type: ignore[misc]


def show(analysis: Any, file: Path, out: Path | None, **options: Any) -> None:
    """Call `measure_and_write` of an analysis, a module of this package, and print its result."""
    pipeline = PipelineConfig.from_yaml(file)
    directory = out or pipeline.default_out
    with show_progress(quiet=current_mode().silent) as (progress, _):
        found = analysis.measure_and_write(pipeline, directory, progress=progress, **options)
    print_result(found, analysis.lines_below(found, directory), lambda _: analysis.table(found))
