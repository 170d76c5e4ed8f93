"""The search of `compress auto`: predict, solve, check by a real run, correct, and again."""

from __future__ import annotations

import logging
import math
import time
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from compress.pipelines.auto.candidate_evaluator import CandidateEvaluator
from compress.pipelines.auto.candidates import rungs
from compress.pipelines.auto.front import (
    Front,
    missed_limits,
    run_point,
    shares_of_limits,
    write_point,
    write_points,
)
from compress.pipelines.auto.search_state import BlockVariant, SearchState
from compress.pipelines.auto.strategy.block_variants import BlockVariants
from compress.pipelines.auto.strategy.recovery import HALVINGS_FILE, Recovery, latency_targets
from compress.pipelines.system.jsonl_log import (
    LOG,
    LOGGER,
    LogFile,
    RunEvent,
    event_listener,
    log_handler,
)
from compress.pipelines.system.machine_info import machine, versions
from compress.profiling.peak_memory import measurement_process

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from compress.pipelines.auto.candidates import CheckedModel
    from compress.pipelines.auto.cost_models.tables import LatencyTables
    from compress.pipelines.auto.search_state import Programmes
    from compress.pipelines.config.auto_settings import AutoSettings
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.config.run_options import RunOptions

FIRST_SHARE, SENSITIVITY_SHARE = 0.1, 0.35
"""Shares of the time after which what single cuts lose is taken as it is known: early, for a first
model, and once more."""
BLOCKS_SHARE = 0.5
"""Share of the time that is left after a first model, until training, for models without some
blocks; of what is left then, the same share is for what single cuts lose there."""
UNTRAINED_SHARE = 0.25
"""Share of the time after which models are trained, where `recovery` says so; what single cuts lose
matters less then. Twice as much where blocks may be removed."""


def search(
    pipeline: PipelineConfig,
    settings: AutoSettings,
    out: Path,
    options: RunOptions,
    tables: LatencyTables | None = None,
) -> Front:
    """Look for the models that lose least under limits, until the time is over.

    A search that was stopped goes on where it was, in its folder of results. `tables` are latencies
    of another machine, which are taken instead of measuring any here.

    Raises:
        PipelineInvalid: the pipeline has stages that the search itself adds, or no data, or the
            tables are of another model or of other calls.
        StageFailed: the model cannot be traced, exported or evaluated, or the machine is too busy.
        Unavailable: a runtime is not installed.
    """
    if tables is not None:
        tables.refuse_other_settings(settings, pipeline.threads)
    start = time.monotonic()
    # Of all candidates in one process, which imports the libraries once.
    with search_log(out), measurement_process():
        emit = event_listener(options.announce)
        fields: dict[str, Any] = {
            "pipeline": pipeline.name,
            "versions": dict(versions()),
            "machine": dict(machine()),
            "settings": settings.model_dump(mode="json", exclude_unset=True),
        }
        line = f"{pipeline.name}: search started"
        emit(RunEvent("search_started", None, line, fields, is_announced=False))
        evaluator = CandidateEvaluator.from_pipeline(pipeline, settings, out, options)
        if tables is not None:
            evaluator.tables, evaluator.base_ms = tables, tables.base_ms
        front = run_search(SearchState(evaluator, emit=emit), start + settings.time)
        seconds = time.monotonic() - start
        fields = {"best": front.best, "points": front.points, "seconds": seconds}
        line = f"{len(front.checked)} models checked, best: {front.best or 'none'}"
        emit(RunEvent("search_finished", None, line, fields, is_announced=False))
    return front


@contextmanager
def search_log(out: Path) -> Iterator[None]:
    """Append the events of a block to the log in a folder, without those of runs within it."""
    out.mkdir(parents=True, exist_ok=True)
    log = LogFile(out / LOG, uuid.uuid4().hex[:12], lambda: "")

    def is_innermost(_: object) -> bool:
        handlers = logging.getLogger(LOGGER).handlers
        return next((h for h in reversed(handlers) if isinstance(h, LogFile)), None) is log

    log.addFilter(is_innermost)
    with log_handler(log):
        yield


def run_search(state: SearchState, deadline: float) -> Front:
    """Search until a deadline, or until nothing is left to try; return the front.

    The deadline is on the clock of :func:`time.monotonic`.
    """
    evaluator, settings = state.evaluator, state.settings
    earlier = Front.read(state.out)
    if earlier is not None and earlier.conditions == evaluator.conditions:
        # Figures of earlier versions, or of other limits, may lack what is needed now.
        state.checked = {
            model.name: model
            for model in earlier.checked
            if math.inf not in shares_of_limits(settings.limits, model).values()
        }
        evaluator.base_ms = earlier.base_ms
    half, most = evaluator.decided_on, settings.limits.max_drop
    points = half.points_of_sample  # of less than one sample, `max_drop` allows none
    if most and most < points:
        state.warn(
            f"half of val has {half.samples} samples, and one of them is worth {points:.3g} "
            f"points, more than max_drop {most:g}: no sample may be lost"
        )
    state.check_whole(deadline)
    if time.monotonic() < deadline:
        whole = BlockVariant.from_model(evaluator, evaluator.model)
        if evaluator.tables is not None:
            evaluator.tables.refuse_other_model(whole.space.grid, evaluator.batch)
        variants = BlockVariants(state, whole)
        if settings.space.blocks:
            variants.find_order(deadline)
        state.is_infeasible = not variants.are_feasible(deadline)
        if not state.is_infeasible:
            state.measure_kernels(whole, deadline)
            _check_cut(state, variants, deadline)
    # Of those that meet all limits, the best first is confirmed, until one passes.
    wanted = [model for model in state.offered() if not missed_limits(settings.limits, model)]
    by_loss = state.loss_decides
    wanted.sort(key=lambda m: m.loss_order if by_loss else (m.latency_ms, m.drop or 0.0))
    best = next((model.name for model in wanted if _passes(state, model)), None)
    front = write_points(state.front(best), evaluator, best)
    front.write(state.out)
    return front


def _check_cut(state: SearchState, variants: BlockVariants, deadline: float) -> None:
    """Check smaller models, first as they are after a refit, then trained."""
    seconds, recovery = state.settings.time, state.settings.space.recovery
    begin, is_left = deadline - seconds, True
    untrained_share = UNTRAINED_SHARE * (1 + bool(variants.shallower)) if recovery else 1.0
    until = begin + untrained_share * seconds
    for share in (FIRST_SHARE, min(SENSITIVITY_SHARE, untrained_share)):
        if share != FIRST_SHARE:
            now = time.monotonic()
            variants.add(now + BLOCKS_SHARE * (until - now))
        measured_until = begin + share * seconds
        if len(variants.added) > 1:  # each with cuts of its own
            now = time.monotonic()
            measured_until = max(measured_until, now + BLOCKS_SHARE * (until - now))
        programmes = variants.programmes(min(deadline, measured_until))
        if state.models and time.monotonic() < until:
            is_left = _check_next(state, programmes)
    while state.models and is_left and time.monotonic() < until:
        is_left = _check_next(state, programmes)
    if state.models and recovery is not None:
        key = state.evaluator.conditions + state.settings.limits.model_dump_json()
        ends = rungs(recovery.epochs)
        Recovery(state, programmes, ends, state.out / HALVINGS_FILE, key).train(deadline)


def _check_next(state: SearchState, programmes: Programmes) -> bool:
    """Check the next model, and correct the prediction; return whether there was one."""
    targets: list[float | None] = [*latency_targets(state)]
    if not any(map(state.is_good, state.offered())):
        # A format that loses too much as a whole may do with some layers in float.
        targets.append(None)
    known = [*(model.candidate for model in state.checked.values()), *state.failed]
    for target_ms in targets:
        found = state.solve(programmes, target_ms, known)
        if found is not None:
            state.check(found.candidate, found.predicted_ms)
            return True
    return False


def _passes(state: SearchState, model: CheckedModel) -> bool:
    """Confirm a model, and run its pipeline; return whether it keeps to all limits."""
    confirmed = state.checked[model.name] = state.evaluator.confirm(model)
    if confirmed.confirmed_drop is None or missed_limits(state.settings.limits, confirmed):
        return False
    front = state.front(best=model.name)
    front.write(state.out)
    write_point(front, state.evaluator, confirmed)
    return run_point(front, state.evaluator, confirmed)
