"""Events of a run; the terminal, the log and the tracker all receive the same ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from pipelines.system.jsonl_log import log_event

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
