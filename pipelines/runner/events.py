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
    from compress.core.gate import Verdict
    from pipelines.results.measurements import Measurements
    from pipelines.results.schema import FailureReport, Report, SkippedReport
    from pipelines.runner.executor import Sought, Walk

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
class Happening:
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


Listener: TypeAlias = Callable[[Happening], None]


def run_started(walk: Walk) -> Happening:
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
    return Happening("run_started", None, line, fields, is_announced=False)


def task_known(line: str) -> Happening:
    """Build the event that the loss and the metric follow from the data."""
    return Happening("task_known", None, line)


def run_finished(report: Report, seconds: float) -> Happening:
    """Return how a run ended."""
    fields = {
        "status": report.status,
        "error": report.error,
        "seconds": seconds,
        "test": report.test.values if report.test else {},
    }
    level: Level = "info" if report.status == "passed" else "error"
    line = f"{report.pipeline}: {report.status}"
    return Happening("run_finished", None, line, fields, level, is_announced=False)


def warned(warning: str) -> Happening:
    """Return that something is suspicious."""
    return Happening("message", None, f"warning: {warning}", level="warning")


def started(stage: str, reason: str) -> Happening:
    """Return that a stage's artifact is made from here on, and why."""
    line = f"{stage}: running ({reason})"
    return Happening("stage_started", stage, line, {"reason": reason})


def finished(
    sought: Sought,
    artifact: Artifact,
    judged_seconds: float,
    measurements: Measurements | None,
    verdicts: Sequence[Verdict] = (),
) -> Happening:
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
    return Happening(event, sought.name, f"{sought.name}: {', '.join(told)}", fields)


def judged(stage: str, verdict: Verdict) -> Happening:
    """Return what a gate found."""
    line = f"{stage}: {verdict.gate} {'passed' if verdict.passed else 'refused'}"
    level: Level = "info" if verdict.passed else "error"
    fields = verdict.model_dump(mode="json")
    return Happening("gate_judged", stage, line, fields, level, is_announced=False)


def failed(failure: FailureReport, ends_run: bool) -> Happening:
    """Return that a stage had nothing to show; the error of the run itself is said at its end."""
    why = " ".join(lines_of(failure.error)).removeprefix(f"{failure.name}: ")
    how = INTERRUPTED if failure.status == INTERRUPTED else f"failed: {why}"
    line, fields = f"{failure.name}: {how}", {"error": failure.error}
    return Happening("stage_failed", failure.name, line, fields, "error", not ends_run)


def skipped(left_out: SkippedReport) -> Happening:
    """Return that a stage cannot run."""
    line = f"{left_out.name}: skipped, as {left_out.because} did not pass"
    return Happening("stage_skipped", left_out.name, line, level="warning")
