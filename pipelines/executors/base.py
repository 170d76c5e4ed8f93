"""The interface of what runs several stages at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pipelines.executors.task import StageTask, TaskResult


class Engine(Protocol):
    """Runs several stages at a time, in other processes or on other machines."""

    @property
    def places(self) -> int:
        """How many stages it runs at a time."""
        ...

    def submit(self, task: StageTask) -> None:
        """Start a stage; at most `places` at a time."""
        ...

    def next(self) -> TaskResult:
        """Wait until a submitted stage has finished or failed."""
        ...

    def close(self) -> None:
        """Stop the stages that still run."""
        ...
