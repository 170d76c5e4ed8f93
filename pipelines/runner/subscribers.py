"""What is recorded of a run while it is walked: its log, and its tracker's figures."""

from __future__ import annotations

import uuid
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from pipelines.system.jsonl_log import LOG, LogFile, log_event, log_handler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipelines.runner.events import EventListener, RunEvent
    from pipelines.runner.executor import PipelineExecutor


def event_listener(announce: Callable[[str], None]) -> EventListener:
    """Return what logs all that happens in a run, and announces what is for people."""

    def hear(happening: RunEvent) -> None:
        event, stage, level = happening.event, happening.stage, happening.level
        log_event(event, happening.line, stage=stage, level=level, **happening.fields)
        if happening.is_announced:
            announce(happening.line)

    return hear


@contextmanager
def recording(walk: PipelineExecutor) -> Iterator[None]:
    """Record what is logged during a block as a run of its own; nothing here decides a result."""
    run, tracker = uuid.uuid4().hex[:12], walk.pipeline.tracker
    with ExitStack() as stack:
        log = LogFile(walk.out / LOG, run, lambda: walk.outcome.at)
        stack.enter_context(log_handler(log))
        if tracker is not None:
            from pipelines.runner.trackers import tracked

            stack.enter_context(tracked(tracker, walk.out, walk.pipeline.name, run))
        yield
