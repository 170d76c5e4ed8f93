"""Settings of a tracker, to which the figures of runs are written beside the report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from compress.core.settings import Settings

if TYPE_CHECKING:
    from compress.core.requirement import Requirement


class Tracker(Settings):
    """Where a run's settings, figures and report are written too; none of it changes a result."""

    kind: Literal["tensorboard", "mlflow"]
    """`tensorboard` writes an event file for each run, `mlflow` a run of the experiment
    `compress`. Each is an extra of that name."""
    uri: str | None = None
    """Folder, relative to that of the results (`tracking` by default); or MLflow's address."""

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """What must be installed."""
        from compress.training.tracking import REQUIREMENTS

        return (REQUIREMENTS[self.kind],)
