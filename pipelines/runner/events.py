"""Events of a run; the terminal, the log and the tracker all receive the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from compress.common.errors import lines_of
from compress.pipelines.results.schema import rerun_command
from compress.pipelines.system.jsonl_log import log_event
from compress.pipelines.system.machine_info import machine, versions
from compress.pipelines.system.signals import INTERRUPTED

if TYPE_CHECKING:
    from pathlib import Path

    from compress.core.verdict import Verdict
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.results.schema import Report

EventName: TypeAlias = Literal[
    "run_started",
    "task_known",
    "stage_started",
    "stage_finished",
    "stage_cached",
    "gate_judged",
    "stage_failed",
    "stage_skipped",
    "run_finished",
    "search_started",
    "candidate_chosen",
    "candidate_checked",
    "candidate_failed",
    "model_corrected",
    "front_changed",
    "search_finished",
    "message",
]
Level: TypeAlias = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class RunEvent:
    """Something that happened in a run."""

    event: EventName
    stage: str | None
    line: str
    """The event in words."""
    fields: dict[str, Any] = field(default_factory=dict)
    """What `log.jsonl` has besides the words."""
    level: Level = "info"
    is_announced: bool = True
    """Whether it is shown to the user as it happens."""


EventListener: TypeAlias = Callable[[RunEvent], None]


def event_listener(announce: Callable[[str], None]) -> EventListener:
    """Return a listener that logs all events, and announces those that are for the user."""

    def on_event(event: RunEvent) -> None:
        log_event(event.event, event.line, stage=event.stage, level=event.level, **event.fields)
        if event.is_announced:
            announce(event.line)

    return on_event


def run_started_event(pipeline: PipelineConfig, out: Path) -> RunEvent:
    """Build the event that a run starts, with its settings, versions and machine."""
    fields = {
        "pipeline": pipeline.name,
        "command": rerun_command(pipeline.file, out),
        "versions": dict(versions()),
        "machine": dict(machine()),
        "settings": pipeline.model_dump(mode="json", by_alias=True, exclude_unset=True),
    }
    line = f"{pipeline.name}: started"
    return RunEvent("run_started", None, line, fields, is_announced=False)


def run_finished_event(report: Report, seconds: float) -> RunEvent:
    """Build the event that a run has ended, whether it passed or not."""
    fields = {
        "status": report.status,
        "error": report.error,
        "seconds": seconds,
        "test": report.test.values if report.test else {},
    }
    level: Level = "info" if report.status == "passed" else "error"
    line = f"{report.pipeline}: {report.status}"
    return RunEvent("run_finished", None, line, fields, level, is_announced=False)


def stage_started_event(stage: str, reason: str) -> RunEvent:
    """Build the event that a stage runs, and why it is not taken from the store."""
    line = f"{stage}: running ({reason})"
    return RunEvent("stage_started", stage, line, {"reason": reason})


def gate_event(stage: str, verdict: Verdict) -> RunEvent:
    """Build the event that a gate was evaluated."""
    line = f"{stage}: {verdict.gate} {'passed' if verdict.passed else 'refused'}"
    level: Level = "info" if verdict.passed else "error"
    fields = verdict.model_dump(mode="json")
    return RunEvent("gate_judged", stage, line, fields, level, is_announced=False)


def stage_failed_event(stage: str, error: str, *, interrupted: bool, ends_run: bool) -> RunEvent:
    """Build the event that a stage failed; an error that ends the run is announced at its end."""
    why = " ".join(lines_of(error)).removeprefix(f"{stage}: ")
    line = f"{stage}: {INTERRUPTED if interrupted else f'failed: {why}'}"
    return RunEvent("stage_failed", stage, line, {"error": error}, "error", not ends_run)


def stage_skipped_event(stage: str, because: str) -> RunEvent:
    """Build the event that a stage is skipped because another one did not pass."""
    line = f"{stage}: skipped, as {because} did not pass"
    return RunEvent("stage_skipped", stage, line, level="warning")
