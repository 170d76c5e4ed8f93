"""Builds the report of a run, with warnings of what is suspicious although no gate refused it."""

from __future__ import annotations

import logging
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from compress.data.sample_cache import PROBES
from compress.data.stream import FIRST_SAMPLES
from compress.pipelines.config.model_spec import SOURCE
from compress.pipelines.planning.plan import accuracy_drops
from compress.pipelines.results.schema import Report, measurement_warnings, rerun_command
from compress.pipelines.runner.run_report import constant_score, unlike_val
from compress.pipelines.system.machine_info import machine, versions
from compress.pipelines.system.signals import INTERRUPTED, only_signals_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.pipelines.results.schema import Status
    from compress.pipelines.runner.run_state import RunState

log = logging.getLogger(__name__)


def build_report(state: RunState, status: Status, error: str = "") -> Report:
    """Build the report of what a run has produced until it ended, with the error that ended it."""
    plan, outcome, pipeline = state.plan, state.outcome, state.pipeline
    stages = tuple(state.reports[name] for name in plan.ordered(state.reports))
    failures = tuple(outcome.failures[name] for name in plan.ordered(outcome.failures))
    # They may read data and score: who interrupts a run does not wait for that.
    doubts = accuracy_warnings(state) if status != INTERRUPTED else {}
    doubts |= state.test.unlike_val if state.test else {}
    doubtful = {name for names in doubts.values() for name in names}
    return Report(
        pipeline=pipeline.name,
        status=status,
        error=error,
        date=datetime.now(UTC).isoformat(" ", "minutes"),
        failed_stage=failures[0] if failures else None,
        failures=failures,
        skipped=tuple(outcome.skipped[name] for name in plan.ordered(outcome.skipped)),
        baseline_name=plan.baseline,
        baseline=state.baseline,
        stages=stages,
        warnings=(
            *state.data_warnings,
            *dict.fromkeys(
                kept.line()
                for n in plan.ordered(state.artifacts)
                if (kept := state.artifacts[n].signature.state)
            ),
            *doubts,
            *measurement_warnings(stages, plan.baseline, state.baseline),
            *_sampling_warnings(state),
            *state.store.warnings,
        ),
        accuracy_doubts=tuple(
            n
            for n in (SOURCE, *plan.names)
            if doubtful & {n, *(plan.branch(n) if n != SOURCE else ())}
        ),
        test=state.test,
        lock={
            "source": state.store.last_parts(SOURCE),
            "file": pipeline.file,
            "command": rerun_command(pipeline.file, state.out),
            "versions": dict(versions()),
            "machine": dict(machine()),
            "seed": pipeline.seed,
            "data": state.fingerprint,
            "artifacts": {n: state.artifacts[n].digest for n in plan.ordered(state.artifacts)},
            "settings": pipeline.model_dump(mode="json", by_alias=True),
        },
    )


def accuracy_warnings(state: RunState) -> dict[str, tuple[str, ...]]:
    """Return a warning for each suspicious accuracy, with its likely cause → stages it is about."""
    warnings: dict[str, tuple[str, ...]] = {}
    try:
        with only_signals_interrupt():
            warnings.update(_accuracy_warnings(state))
    except Exception:  # the report is written all the same, with the warnings so far
        log.debug("accuracies could not be checked", exc_info=True)
    return warnings


def _accuracy_warnings(state: RunState) -> Iterator[tuple[str, tuple[str, ...]]]:
    plan, metric, data = state.plan, state.plan.metric, state.data
    measurements = {name: report.measurements for name, report in state.reports.items()}
    if state.baseline:
        measurements = {plan.baseline: state.baseline} | measurements
    measured = {name: m.metric.value for name, m in measurements.items() if m.metric}
    values = {name: value for name, value in measured.items() if math.isfinite(value)}
    if plan.baseline not in values:
        return
    for drop in accuracy_drops(plan, metric, values):
        stage: Any = plan.stage(drop.stage).stage
        cause = ""
        if stage.needs_data and stage.drawn_samples and data is not None:
            cause = unlike_val(data, stage.available_samples(data), state.pipeline.seed)
        if cause or not drop.is_judged:
            yield drop.line(metric, cause), (drop.stage,)
    if data is None:
        return
    key = {"constant answer": 1, "data": state.fingerprint, "metric": metric.identity()}
    constant = state.entries[plan.baseline].cached_value(
        key, state.artifacts[plan.baseline], lambda: constant_score(data, metric)
    )
    if not isinstance(constant, int | float):
        return
    no_better = [
        name
        for name in (SOURCE, *plan.names)
        # Rounded, as 1e-17 is no improvement either.
        if name in values and round(metric.drop_points(constant, values[name]), 9) >= 0
    ]
    if no_better:
        yield (
            f"{', '.join(no_better)}: {metric.name} is no better than that of one and the same "
            f"answer to every sample ({constant:.4f} on val); train longer, or judge by another "
            "metric",
            tuple(no_better),
        )


def _sampling_warnings(state: RunState) -> Iterator[str]:
    """Yield which splits were hashed in part only, where that could hide a change of the data."""
    contents = state.contents
    if contents is None:
        return
    for name in sorted({"val", "test"} & contents.cached):
        yield (
            f"data.{name}: read through data.loader.cache; only {PROBES} samples are compared "
            "with the dataset"
        )
    cached = [
        planned.name
        for planned in state.plan.stages
        if planned.stage.uses_data
        and planned.name in state.reports
        and state.reports[planned.name].cached
    ]
    if not cached:
        return
    for name, fingerprint in contents.streams.items():
        if fingerprint is None and contents.counts[name] == FIRST_SAMPLES:
            yield (
                f"data.{name}: a stream (the first {FIRST_SAMPLES} samples hashed); a change of "
                "the others, or of their order, would not be seen in what is cached "
                f"({', '.join(cached)}); give the dataset an attribute fingerprint, a text that "
                "changes with its content"
            )
    for name in sorted({*contents.sampled} - contents.unrepeatable):
        counts = f"{contents.counts[name]} of {contents.lengths[name]} samples"
        yield (
            f"data.{name}: sampled ({counts} hashed); a change of the others would not be seen "
            f"in what is cached ({', '.join(cached)})"
        )
