"""`compress auto`: limits from the file and the command line, a search with progress, its table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from compress.common.atomic_files import write_atomically
from compress.common.errors import GateRefused, PipelineInvalid, StageFailed
from compress.pipelines.config.auto_settings import AutoLimits, AutoSettings, LatencyLimit
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.system.machine_info import machine, versions
from compress.pipelines.system.signals import INTERRUPTED
from compress.pipelines.terminal.console import current_mode, print_result
from compress.pipelines.terminal.progress_bars import show_progress

if TYPE_CHECKING:
    from pathlib import Path

    from compress.pipelines.auto.candidates import CheckedModel
    from compress.pipelines.auto.cost_models.tables import LatencyTables
    from compress.pipelines.auto.front import Front


def search_and_print(
    file: Path, out: Path | None, tables: Path | None, tables_only: bool, **given: Any
) -> None:
    """Search a pipeline file's models, and print those that no other one beats.

    `tables` are of another machine, for which latencies are predicted then; with `tables_only` such
    tables are measured for this one, and nothing is searched. `given` has limits, `time` and
    `points` of the command line, None where the file's own count.
    """
    pipeline = PipelineConfig.from_yaml(file)
    settings = with_limits(pipeline.auto or AutoSettings(), given)
    if tables_only and tables is not None:
        raise PipelineInvalid("--tables-only measures this machine, and --tables is of another one")
    folder = out or pipeline.default_out
    from compress.pipelines.auto.cost_models.tables import LatencyTables
    from compress.pipelines.auto.front import (
        FRONT_PAGE,
        Front,
        front_page,
        front_table,
        lines_below,
    )
    from compress.pipelines.auto.search import search

    if tables_only:
        measured = measure_tables(pipeline, settings, folder)
        print_result(measured, measured.lines(folder))
        return
    known = None if tables is None else LatencyTables.read(tables)
    with show_progress(quiet=current_mode().silent) as (progress, announce):
        options = RunOptions(progress=progress, announce=announce)
        try:
            front = search(pipeline, settings, folder, options, known)
        except KeyboardInterrupt as error:
            so_far = Front.read(folder)
            if so_far is not None:
                write_atomically(folder / FRONT_PAGE, front_page(so_far))
                note = (
                    f"{INTERRUPTED} after {len(so_far.checked)} models, see {folder / FRONT_PAGE}"
                )
                # Before that of a candidate's run, as the first one is shown.
                error.__notes__ = [note, *getattr(error, "__notes__", ())]
            raise
        write_atomically(folder / FRONT_PAGE, front_page(front))
    print_result(front, lines_below(front, folder), lambda _: front_table(front))
    if front.best is None:
        raise GateRefused(nothing_found(front))


def measure_tables(pipeline: PipelineConfig, settings: AutoSettings, out: Path) -> LatencyTables:
    """Measure what a search on another machine predicts latencies of this one by, and write it."""
    from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator
    from compress.pipelines.auto.cost_models.tables import LatencyTables, ModelTable
    from compress.pipelines.auto.search_state import BlockVariant, SearchState
    from compress.pruning.latency.widths import WidthSpace

    if settings.space.widths is None:
        raise PipelineInvalid("--tables-only: auto.space.widths is null, so nothing depends on it")
    LatencyTables.refuse_blocks(settings)
    with show_progress(quiet=current_mode().silent) as (progress, announce):
        options = RunOptions(progress=progress, announce=announce)
        evaluator = CandidateEvaluator.from_pipeline(pipeline, settings, out, options)
        state = SearchState(evaluator)
        state.check_whole(math.inf)
        # Which channels stay does not change the latency, so they need not be ranked by data.
        widths = settings.space.widths.model_copy(update={"importance": "random"})
        space = WidthSpace.from_model(
            evaluator.model, evaluator.context, widths.selection, widths.values
        )
        if not space.grid:
            raise StageFailed("--tables-only: no channels of the model can be removed")
        state.measure_kernels(BlockVariant((), evaluator.model, space))
        if not state.models:
            raise StageFailed("--tables-only: no format could be measured; see the warnings")
    tables = LatencyTables(
        machine=machine(),
        versions=versions(),
        threads=evaluator.context.threads,
        batch=evaluator.batch,
        base_ms=evaluator.base_ms,
        grid=dict(space.grid),
        models=tuple(map(ModelTable.from_model, state.models.values())),
    )
    tables.write(out)
    return tables


def with_limits(settings: AutoSettings, given: dict[str, Any]) -> AutoSettings:
    """Return settings with what the command line gives in the place of the file's."""
    changes = {name: value for name, value in given.items() if value is not None}
    # As numbers have a unit where they are read, those of the file are not read again.
    limits, latency = settings.limits, settings.limits.latency or LatencyLimit.model_construct()
    for option, value in changes.items():
        try:
            if option in ("time", "points"):
                read: Any = AutoSettings.model_validate({option: value})
                settings = settings.model_copy(update={option: getattr(read, option)})
                continue
            # The percentile is a number without a unit in a file, as in gates, and has one here.
            name = "latency" if option == "p95" else option
            read = getattr(AutoLimits.model_validate({name: value}), name)
        except ValidationError as error:
            problem = error.errors()[0]
            message = str(problem["msg"]).removeprefix("Value error, ")
            option = option.replace("_", "-")
            raise PipelineInvalid(f"--{option} {value}: {message}") from None
        if name == "latency":
            field = "p95_ms" if option == "p95" else "p50_ms"
            read = latency = latency.model_copy(update={field: read.p50_ms})
        limits = limits.model_copy(update={name: read})
    return settings.model_copy(update={"limits": limits})


def nothing_found(front: Front) -> str:
    """Say what comes nearest to the limits, and what would help."""
    from compress.pipelines.auto.front import missed_limits, shares_of_limits

    limits = front.limits

    def distance(model: CheckedModel) -> tuple[float, float]:
        return max(shares_of_limits(limits, model).values(), default=0.0), model.latency_ms

    if front.is_infeasible:
        nearest = min(front.checked, key=distance)
        missed = missed_limits(limits, nearest, but="max_drop")
        return (
            f"no model can be within {limits.described}: the nearest is "
            f"{front.line(nearest, limits)}; allow more {' and '.join(missed)}"
        )
    kept = [
        model
        for model in front.checked
        if model.drop is not None and (limits.max_drop is None or model.drop <= limits.max_drop)
    ]
    if not kept:
        return (
            f"no model keeps the metric within {limits.max_drop:g} points, not even the float one; "
            "allow more"
        )
    nearest = min(kept, key=distance)
    missed = missed_limits(limits, nearest)
    confirmed = ""
    if "max_drop" in missed:
        confirmed = f", and {nearest.confirmed_drop:.3g} points on samples not decided by"
    wanted = f"more {' and '.join(missed)}" if missed else "more"
    return (
        f"no model within {limits.described} was found and confirmed; the nearest is "
        f"{front.line(nearest, limits)}{confirmed}; allow {wanted}, or more --time"
    )
