"""Settings of an experiment tracker, which receives the figures of runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from compress.common.config import Settings

if TYPE_CHECKING:
    from compress.common.requirements import Requirement


class Tracker(Settings):
    """Where a run's settings, figures and report are written too; none of it changes a result."""

    kind: Literal["tensorboard", "mlflow"]
    """`tensorboard` writes an event file for each run, `mlflow` a run of the experiment
    `compress`. Each is an extra of that name."""
    uri: str | None = None
    """Folder, relative to that of the results (`tracking` by default); or MLflow's address."""

    @model_validator(mode="after")
    def _uri_fits(self) -> Self:
        address = self.uri is not None and "://" in self.uri
        if address and self.kind == "tensorboard":
            raise ValueError("tensorboard writes to a folder, and uri is an address")
        if address and "@" in urlsplit(str(self.uri)).netloc:
            raise ValueError(
                "uri would show its password in logs and reports; put that into "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
            )
        return self

    @property
    def requirements(self) -> tuple[Requirement, ...]:
        """What must be installed."""
        from compress.training.config.profiling import TRACKER_REQUIREMENTS

        return (TRACKER_REQUIREMENTS[self.kind],)
