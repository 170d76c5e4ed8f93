"""What a run found to be suspicious although no gate refused it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

from pipelines.planning.plan import SOURCE
from pipelines.planning.unjudged_losses import Fall, falls
from pipelines.runner.data_warnings import constant_score, unlike_val
from pipelines.system.signals import only_signals_interrupt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipelines.runner.executor import PipelineExecutor

log = logging.getLogger(__name__)


def suspicions(walk: PipelineExecutor) -> tuple[str, ...]:
    """Return a line for each suspicion, with its likely cause.

    A report is written whatever happens here: what cannot be found out is left out.
    """
    found: list[str] = []
    try:
        with only_signals_interrupt():
            found.extend(_suspicions(walk))
    except Exception:
        log.debug("suspicions could not be found out", exc_info=True)
    return tuple(found)


def _suspicions(walk: PipelineExecutor) -> Iterator[str]:
    values = _values(walk)
    if walk.plan.baseline not in values:
        return
    metric = walk.plan.metric
    for fall in falls(walk.plan, metric, values):
        cause = _likely_cause(walk, fall)
        if cause or not fall.is_judged:
            yield fall.line(metric, cause)
    yield from _no_better_than_constant(walk, values)


def _values(walk: PipelineExecutor) -> dict[str, float]:
    """Return the metric by stage, as far as it was measured."""
    measured = {row.name: row.measurements for row in walk.rows}
    if walk.baseline:
        measured = {walk.plan.baseline: walk.baseline} | measured
    found = {name: m.metric.value for name, m in measured.items() if m.metric}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _likely_cause(walk: PipelineExecutor, fall: Fall) -> str:
    """Return in words how a stage was calibrated on other inputs than it is asked; else nothing."""
    stage: Any = walk.plan.stage(fall.stage).stage
    samples = getattr(stage, "calibration_samples", None)
    if not samples or walk.data is None:
        return ""
    return unlike_val(walk.data, samples, walk.pipeline.seed)


def _no_better_than_constant(walk: PipelineExecutor, values: Mapping[str, float]) -> Iterator[str]:
    data, metric, baseline = walk.data, walk.plan.metric, walk.plan.baseline
    if data is None:
        return
    question = {"constant answer": 1, "data": walk.fingerprint, "metric": metric.identity()}
    constant = walk.entries[baseline].cached_value(
        question, walk.artifacts[baseline], lambda: constant_score(data, metric)
    )
    if not isinstance(constant, int | float):
        return
    names = [
        name
        for name in (SOURCE, *walk.plan.names)
        if name in values and round(metric.drop_points(constant, values[name]), 9) >= 0
    ]
    if names:
        yield (
            f"{', '.join(names)}: {metric.name} is no better than that of one and the same answer "
            f"to every sample ({constant:.4f} on val); train longer, or judge by another metric"
        )
