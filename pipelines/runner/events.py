"""What happens in a run, told when it happens: people, the log and the tracker hear the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from compress.common.errors import lines_of
from pipelines.results.schema import how_to_run
from pipelines.system.machine_info import machine, versions
from pipelines.system.signals import INTERRUPTED

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.verdict import Verdict
    from pipelines.results.measurements import Measurements
    from pipelines.results.schema import FailureReport, Report, SkippedReport
    from pipelines.runner.executor import CacheLookup, PipelineExecutor

Event: TypeAlias = Literal[
    "run_started",
    "task_known",
    "stage_started",
    "stage_finished",
    "stage_cached",
    "gate_judged",
    "stage_failed",
    "stage_skipped",
    "run_finished",
    "message",
]
Level: TypeAlias = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class RunEvent:
    """One thing that happened."""

    event: Event
    stage: str | None
    line: str
    """It in words."""
    fields: dict[str, Any] = field(default_factory=dict)
    """What the log has beside the words."""
    level: Level = "info"
    is_announced: bool = True
    """Whether people are told of it when it happens."""


EventListener: TypeAlias = Callable[[RunEvent], None]


def run_started_event(walk: PipelineExecutor) -> RunEvent:
    """Return that a walk begins."""
    pipeline = walk.pipeline
    fields = {
        "pipeline": pipeline.name,
        "command": how_to_run(pipeline.file, walk.out),
        "versions": dict(versions()),
        "machine": dict(machine()),
        "settings": pipeline.model_dump(mode="json", by_alias=True, exclude_unset=True),
    }
    line = f"{pipeline.name}: started"
    return RunEvent("run_started", None, line, fields, is_announced=False)


def task_known(line: str) -> RunEvent:
    """Build the event that the loss and the metric follow from the data."""
    return RunEvent("task_known", None, line)


def run_finished_event(report: Report, seconds: float) -> RunEvent:
    """Return how a run ended."""
    fields = {
        "status": report.status,
        "error": report.error,
        "seconds": seconds,
        "test": report.test.values if report.test else {},
    }
    level: Level = "info" if report.status == "passed" else "error"
    line = f"{report.pipeline}: {report.status}"
    return RunEvent("run_finished", None, line, fields, level, is_announced=False)


def warned(warning: str) -> RunEvent:
    """Return that something is suspicious."""
    return RunEvent("message", None, f"warning: {warning}", level="warning")


def stage_started_event(stage: str, reason: str) -> RunEvent:
    """Return that a stage's artifact is made from here on, and why."""
    line = f"{stage}: running ({reason})"
    return RunEvent("stage_started", stage, line, {"reason": reason})


def stage_finished_event(
    sought: CacheLookup,
    artifact: Artifact,
    judged_seconds: float,
    measurements: Measurements | None,
    verdicts: Sequence[Verdict] = (),
) -> RunEvent:
    """Return that a stage's artifact is there, measured and judged.

    Args:
        sought: how it was come by.
        artifact: the artifact.
        judged_seconds: how long gates and measurements took.
        measurements: what was measured; of the model as it came in perhaps nothing.
        verdicts: what its gates found.
    """
    origin = f" (from {sought.entry.fetched_from})" if sought.entry.fetched_from else ""
    told = [f"made in {sought.seconds:.1f} s" if sought.reason else f"cached{origin}"]
    if judged_seconds:
        told.append(f"judged in {judged_seconds:.1f} s")
    if measurements and measurements.metric:
        told.append(f"{measurements.metric.name} {measurements.metric.value:.4f}")
    if verdicts:
        told.append(f"{sum(v.passed for v in verdicts)}/{len(verdicts)} gates passed")
    fields = {
        "seconds": sought.seconds,
        "judged_seconds": judged_seconds,
        "kind": artifact.kind,
        "digest": artifact.digest,
        "measurements": measurements.model_dump(mode="json") if measurements else None,
    }
    event: Event = "stage_finished" if sought.reason else "stage_cached"
    return RunEvent(event, sought.name, f"{sought.name}: {', '.join(told)}", fields)


def gate_event(stage: str, verdict: Verdict) -> RunEvent:
    """Return what a gate found."""
    line = f"{stage}: {verdict.gate} {'passed' if verdict.passed else 'refused'}"
    level: Level = "info" if verdict.passed else "error"
    fields = verdict.model_dump(mode="json")
    return RunEvent("gate_judged", stage, line, fields, level, is_announced=False)


def stage_failed_event(failure: FailureReport, ends_run: bool) -> RunEvent:
    """Return that a stage had nothing to show; the error of the run itself is said at its end."""
    why = " ".join(lines_of(failure.error)).removeprefix(f"{failure.name}: ")
    how = INTERRUPTED if failure.status == INTERRUPTED else f"failed: {why}"
    line, fields = f"{failure.name}: {how}", {"error": failure.error}
    return RunEvent("stage_failed", failure.name, line, fields, "error", not ends_run)


def stage_skipped_event(left_out: SkippedReport) -> RunEvent:
    """Return that a stage cannot run."""
    line = f"{left_out.name}: skipped, as {left_out.because} did not pass"
    return RunEvent("stage_skipped", left_out.name, line, level="warning")
