"""The making of one artifact, as one value that can also be given to another process."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from compress.common.dependency_recorder import Recording, recording
from compress.common.process import gc_frozen
from pipelines.system.error_context import named

if TYPE_CHECKING:
    from pathlib import Path

    from compress.artifacts.artifact import Artifact
    from compress.common.errors import CompressError
    from compress.core.context import Context
    from compress.core.progress import Progress
    from compress.core.stage import Stage


@dataclass(frozen=True)
class TaskResult:
    """How the making of a stage's artifact has ended."""

    name: str
    seconds: float
    error: CompressError | None
    recorded: Recording = field(default_factory=Recording)
    """What user code read meanwhile."""


@dataclass(frozen=True)
class StageTask:
    """A stage whose inputs are there, and where it is to run."""

    name: str
    stage: Stage[Any, Any]
    input: str
    """Name of the artifact that it reads, among those of the context."""
    context: Context

    def __call__(self, progress: Progress) -> tuple[Artifact, float, Recording]:
        """Return what the stage makes, how many seconds it took, and what user code read meanwhile.

        Raises:
            CompressError: it could not do its work; the message begins with its name.
        """
        began = time.monotonic()
        with named(self.name, self.out), gc_frozen(), recording() as recorded:
            model = self.context.artifacts[self.input]
            made = self.stage.run(model, replace(self.context, progress=progress))
        return made, time.monotonic() - began, recorded

    @property
    def out(self) -> Path:
        """Directory of the results."""
        return self.context.results or self.context.root.parent
