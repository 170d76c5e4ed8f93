"""Running one stage, as a value that can be sent to another process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from compress.common.dependency_recorder import Recording, recording
from compress.pipelines.system.error_context import name_stage_in_errors

if TYPE_CHECKING:
    from pathlib import Path

    from compress.artifacts.artifact import Artifact
    from compress.common.errors import CompressError
    from compress.core.context import Context
    from compress.core.progress import Progress
    from compress.core.stage import Stage


@dataclass(frozen=True)
class TaskResult:
    """How a stage that another process ran has ended."""

    name: str
    seconds: float
    error: CompressError | None
    recorded: Recording = field(default_factory=Recording)
    """The files and variables that user code read meanwhile."""


@dataclass(frozen=True)
class StageTask:
    """A stage whose inputs are there, and the context that it runs in."""

    name: str
    stage: Stage[Any, Any]
    input: str
    """Name of the artifact that it reads, among those of the context."""
    context: Context

    def __call__(self, progress: Progress) -> tuple[Artifact, float, Recording]:
        """Run the stage.

        Returns:
            Its artifact, how many seconds it took, and the files and variables that user code read.

        Raises:
            CompressError: it could not do its work; the message begins with its name.
        """
        began = time.monotonic()
        with name_stage_in_errors(self.name, self.out), recording() as recorded:
            model = self.context.artifacts[self.input]
            artifact = self.stage.run_checked(model, replace(self.context, progress=progress))
        return artifact, time.monotonic() - began, recorded

    @property
    def out(self) -> Path:
        """Folder of the results."""
        return self.context.results or self.context.root.parent
