"""Running one stage, as a value that can be sent to another process."""

from __future__ import annotations

import logging
import pickle
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from compress.common.dependency_recorder import Recording, recording
from compress.common.errors import CompressError, StageFailed, first_line
from compress.core.progress import Progress, silent
from compress.pipelines.system.error_context import name_stage_in_errors
from compress.pipelines.system.signals import only_signals_interrupt, raise_if_stopped

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.stage import Stage


@dataclass(frozen=True)
class TaskResult:
    """How a stage that another process ran has ended."""

    name: str
    seconds: float = 0.0
    error: CompressError | None = None
    recorded: Recording = field(default_factory=Recording)
    """The files and variables that user code read meanwhile."""

    @classmethod
    def failed(cls, name: str, why: str) -> TaskResult:
        """Return that a stage failed, and why."""
        return cls(name, error=StageFailed(f"{name}: {why}"))


@dataclass(frozen=True)
class StageTask:
    """A stage whose inputs are there, and the context that it runs in."""

    name: str
    stage: Stage[Any, Any]
    input: str
    """Name of the artifact that it reads, among those of the context."""
    context: Context

    def __call__(self, progress: Progress) -> tuple[Artifact, float, Recording]:
        """Run the stage; return its artifact, its seconds, and what user code read meanwhile."""
        began = time.monotonic()
        out = self.context.results or self.context.root.parent
        with name_stage_in_errors(self.name, out), recording() as recorded:
            model = self.context.artifacts[self.input]
            artifact = self.stage.run_checked(model, replace(self.context, progress=progress))
        return artifact, time.monotonic() - began, recorded


def pickled(task: StageTask) -> bytes:
    """Pickle a task for another process, without what only this one has."""
    caches = replace(task.context.caches, scores={})
    context = replace(task.context, progress=silent, caches=caches)
    try:
        return pickle.dumps(replace(task, context=context))
    except Exception as error:
        raise StageFailed(
            f"{task.name}: cannot be sent to another process ({type(error).__name__}: "
            f"{first_line(error)}); run it with --jobs 1"
        ) from error


def run_task(name: str, task: bytes, progress: Progress) -> TaskResult:
    """Run a pickled task, whose artifact then lies in its folder."""
    try:
        with only_signals_interrupt():
            unpickled: StageTask = pickle.loads(task)
            _, seconds, recorded = unpickled(progress)
    except CompressError as error:
        raise_if_stopped()
        logging.getLogger(__name__).debug("%s failed", name, exc_info=True)
        return TaskResult(name, error=error)
    except Exception as error:  # noqa: BLE001 - the run reports it
        raise_if_stopped()
        return TaskResult.failed(name, f"{type(error).__name__}: {first_line(error)}")
    return TaskResult(name, seconds, recorded=recorded)


def log_here(record: logging.LogRecord, stage: str) -> None:
    """Log here what another process has logged while it ran a stage."""
    # The attribute that compress.pipelines.system.jsonl_log writes into each line.
    record.log_fields = {"stage": stage, **vars(record).get("log_fields", {})}
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
