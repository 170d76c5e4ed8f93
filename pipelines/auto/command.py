"""`compress auto`: limits from the file and the command line, a search with progress, its table."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from compress.common.atomic_files import write_atomically
from compress.common.config import first_problem
from compress.common.errors import GateRefused, PipelineInvalid, StageFailed
from compress.pipelines.config.auto_settings import AutoLimits, AutoSettings, LatencyLimit
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.config.run_options import RunOptions
from compress.pipelines.system import yaml_core
from compress.pipelines.system.machine_info import machine, versions
from compress.pipelines.system.signals import INTERRUPTED
from compress.pipelines.terminal.console import notify, print_result, show_progress

if TYPE_CHECKING:
    from compress.pipelines.auto.cost_models import LatencyTables
    from compress.pipelines.commands.init import InitOptions

WRITTEN = "# Written by `compress auto`, and again whenever it is given the model.\n"


def search_and_print(
    options: InitOptions, out: Path | None, tables: Path | None, tables_only: bool, **given: Any
) -> None:
    """Search the models of a pipeline file, or of a model; print those that no other one beats.

    `tables` are of another machine, for which latencies are predicted then; with `tables_only` such
    tables are measured for this one, and nothing is searched. `given` has limits, `time` and
    `points` of the command line, None where the file's own count.
    """
    file = Path(str(options.model))
    if file.suffix not in (".yaml", ".yml"):
        file = write_pipeline(options, out, with_limits(AutoSettings(), given))
    elif any((options.data, options.checkpoint, options.arguments, options.inputs, options.task)):
        raise PipelineInvalid(f"{file} names its model and data; leave out options that do so")
    pipeline = PipelineConfig.from_yaml(file)
    settings = with_limits(pipeline.auto or AutoSettings(), given)
    if tables_only and tables is not None:
        raise PipelineInvalid("--tables-only measures this machine, and --tables is of another one")
    folder = out or pipeline.default_out
    # They import torch, which refusing a file or a limit does not need.
    from compress.pipelines.auto import front as fronts
    from compress.pipelines.auto.candidate_evaluator import without_searched_stages
    from compress.pipelines.auto.cost_models import LatencyTables
    from compress.pipelines.auto.search import search
    from compress.pipelines.reporting.notebook import view_table

    pipeline, left_out = without_searched_stages(pipeline, settings)
    if left_out:
        notify(f"{file}: left out from the first searched stage on: {', '.join(left_out)}")
    if tables_only:
        measured = measure_tables(pipeline, settings, folder)
        print_result(measured, measured.lines(folder))
        return
    known = None if tables is None else LatencyTables.read(tables)
    with show_progress() as (progress, announce):
        run_options = RunOptions(progress=progress, announce=announce)
        page = folder / fronts.FRONT_PAGE
        try:
            front = search(pipeline, settings, folder, run_options, known)
        except KeyboardInterrupt as error:
            so_far = fronts.Front.read(folder)
            if so_far is not None:
                write_atomically(page, fronts.front_page(so_far))
                note = f"{INTERRUPTED} after {len(so_far.checked)} models, see {page}"
                # Before that of a candidate's run, as the first one is shown.
                error.__notes__ = [note, *getattr(error, "__notes__", ())]
            raise
        write_atomically(page, fronts.front_page(front))
    print_result(front, fronts.lines_below(front, folder), lambda _: view_table(front))
    if front.best is None:
        raise GateRefused(fronts.nothing_found(front))


def write_pipeline(options: InitOptions, out: Path | None, settings: AutoSettings) -> Path:
    """Write the pipeline file that a search of a model amounts to, beside its results."""
    from compress.pipelines.auto.candidate_evaluator import without_searched_stages
    from compress.pipelines.auto.front import PIPELINE_FILE
    from compress.pipelines.commands.init import TIMM_PREFIX, check_model, draft, naming_options

    if options.data is None:
        raise PipelineInvalid("compress auto decides by `val`: give --data, or a pipeline file")
    model = check_model(str(options.model)).removeprefix(TIMM_PREFIX)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(model).resolve().name).strip("-.") or "model"
    file = (out or Path("runs") / name) / PIPELINE_FILE
    if file.exists() and not file.read_text(errors="replace").startswith(WRITTEN):
        raise PipelineInvalid(f"{file} exists and is not overwritten; give another --out")
    with naming_options(file, options):
        content = {**yaml_core.load(draft(file, options).text), "name": name}
    if content["data"].keys() >= {"images", "prepare"}:
        guess = "data.prepare: mean and std are a guess; give those of the training, then"
        notify(f"{file}: {guess}: compress auto {file}")
    stages = content.pop("stages")
    pipeline = PipelineConfig.model_validate({**content, "stages": stages})
    kept = len(without_searched_stages(pipeline, settings)[0].stages)
    content["auto"] = settings.model_dump(mode="json", exclude_defaults=True)
    content |= {"stages": stages[:kept]} if kept else {}
    write_atomically(file, WRITTEN + yaml_core.dump(content))
    return file


def measure_tables(pipeline: PipelineConfig, settings: AutoSettings, out: Path) -> LatencyTables:
    """Measure what a search on another machine predicts latencies of this one by, and write it."""
    from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator
    from compress.pipelines.auto.cost_models import LatencyTables, ModelTable
    from compress.pipelines.auto.search_state import BlockVariant, SearchState
    from compress.pruning.latency.widths import WidthSpace

    if settings.space.widths is None:
        raise PipelineInvalid("--tables-only: auto.space.widths is null, so nothing depends on it")
    LatencyTables.refuse_blocks(settings)
    with show_progress() as (progress, announce):
        options = RunOptions(progress=progress, announce=announce)
        evaluator = CandidateEvaluator.from_pipeline(pipeline, settings, out, options)
        state = SearchState(evaluator)
        state.check_whole(math.inf)
        # Which channels stay does not change the latency, so they need not be ranked by data.
        widths = settings.space.widths.model_copy(update={"importance": "random"})
        model, context = evaluator.model, evaluator.context
        space = WidthSpace.from_model(model, context, widths.selection, widths.values)
        if not space.grid:
            raise StageFailed("--tables-only: no channels of the model can be removed")
        state.measure_kernels(BlockVariant((), model, space))
        if not state.models:
            raise StageFailed("--tables-only: no format could be measured; see the warnings")
    tables = LatencyTables(
        machine=machine(),
        versions=versions(),
        threads=context.threads,
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
            raise PipelineInvalid(
                f"--{option.replace('_', '-')} {value}: {first_problem(error)}"
            ) from None
        if name == "latency":
            field = "p95_ms" if option == "p95" else "p50_ms"
            read = latency = latency.model_copy(update={field: read.p50_ms})
        limits = limits.model_copy(update={name: read})
    return settings.model_copy(update={"limits": limits})
