"""Events of a search, which its `log.jsonl` has; the runs of candidates have logs of their own."""

from __future__ import annotations

import logging
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compress.pipelines.auto.front import Front, missed_limits
from compress.pipelines.system.jsonl_log import LOG, LOGGER, LogFile, RunEvent, log_handler
from compress.pipelines.system.machine_info import machine, versions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from compress.pipelines.auto.candidates import Candidate, CheckedModel
    from compress.pipelines.config.auto_settings import AutoLimits, AutoSettings
    from compress.pipelines.config.pipeline import PipelineConfig


@contextmanager
def search_log(out: Path) -> Iterator[None]:
    """Append the events of a block to the log in a folder, without those of runs within it."""
    out.mkdir(parents=True, exist_ok=True)
    log = LogFile(out / LOG, uuid.uuid4().hex[:12], lambda: "")
    log.addFilter(lambda record: _innermost_log() is log)
    with log_handler(log):
        yield


def _innermost_log() -> LogFile | None:
    handlers = logging.getLogger(LOGGER).handlers
    return next((h for h in reversed(handlers) if isinstance(h, LogFile)), None)


def search_started(pipeline: PipelineConfig, settings: AutoSettings) -> RunEvent:
    """Build the event that a search starts, or goes on."""
    fields = {
        "pipeline": pipeline.name,
        "versions": dict(versions()),
        "machine": dict(machine()),
        "settings": settings.model_dump(mode="json", exclude_unset=True),
    }
    line = f"{pipeline.name}: search started"
    return RunEvent("search_started", None, line, fields, is_announced=False)


def candidate_chosen(candidate: Candidate, predicted_ms: float | None) -> RunEvent:
    """Build the event that a candidate is built and measured next."""
    fields = {
        "candidate": candidate.name,
        "format": candidate.format,
        "runtime": candidate.runtime,
        "widths": dict(candidate.widths),
        "float_layers": candidate.float_layers,
        "removed_blocks": candidate.removed_blocks,
        "trained": candidate.trained,
        "predicted_ms": predicted_ms,
    }
    line = f"{candidate.name}: chosen"
    return RunEvent("candidate_chosen", None, line, fields, is_announced=False)


def candidate_checked(model: CheckedModel, limits: AutoLimits) -> RunEvent:
    """Build the event that a candidate was measured and judged."""
    fields = {
        "candidate": model.name,
        "figures": model.model_dump(mode="json", exclude={"name"}),
        "misses": missed_limits(limits, model),
    }
    return RunEvent("candidate_checked", None, Front.line(model, limits), fields)


def candidate_failed(candidate: Candidate, error: str) -> RunEvent:
    """Build the event that a candidate could not be built."""
    line = f"warning: {candidate.name} could not be made: {error}"
    fields = {"candidate": candidate.name, "error": error}
    return RunEvent("candidate_failed", None, line, fields, "warning")


def model_corrected(model: CheckedModel, uncorrected_ms: float, factor: float) -> RunEvent:
    """Build the event that a measured latency corrects predictions.

    `factor` is that from predicted to measured latency, over all models of its format and runtime.
    """
    fields = {
        "candidate": model.name,
        "format": model.format,
        "runtime": model.runtime,
        "uncorrected_ms": uncorrected_ms,
        "measured_ms": model.latency_ms,
        "factor": factor,
    }
    line = f"latency of {model.format} in {model.runtime}: corrected by {factor:.3g}"
    return RunEvent("model_corrected", None, line, fields, is_announced=False)


def front_changed(points: Sequence[str]) -> RunEvent:
    """Build the event that the front has changed: the models that no other one beats."""
    line = f"{len(points)} models that no other one beats"
    return RunEvent("front_changed", None, line, {"points": [*points]}, is_announced=False)


def search_finished(front: Front, seconds: float) -> RunEvent:
    """Build the event that a search has ended by itself."""
    fields = {"best": front.best, "points": front.points, "seconds": seconds}
    line = f"{len(front.checked)} models checked, best: {front.best or 'none'}"
    return RunEvent("search_finished", None, line, fields, is_announced=False)
