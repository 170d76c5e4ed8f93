"""Writes a run's events to TensorBoard or MLflow."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.errors import first_line
from compress.pipelines.results.measurements import Measurements
from compress.training.loop.metrics import STEP, ExperimentLogger, open_logger

if TYPE_CHECKING:
    from compress.pipelines.config.pipeline import Tracker

log = logging.getLogger(__name__)


class TrackerHandler(logging.Handler):
    """Writes the events among log records to a tracker; if it fails, the run goes on without it."""

    def __init__(self, settings: Tracker, results: Path, title: str, run: str) -> None:
        """Write to the tracker of the settings, under a title and the run's id."""
        super().__init__()
        self.settings, self.results, self.title, self.run = settings, results, title, run
        self.tracker: ExperimentLogger | None = None
        self.has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, if it is an event."""
        fields: dict[str, Any] = getattr(record, "log_fields", {})
        if "event" not in fields or self.has_failed:
            return
        try:
            self._write(fields)
        except Exception as error:  # noqa: BLE001 - a server that is gone must not end a run
            self.has_failed = True
            kind, how = self.settings.kind, f"{type(error).__name__}: {first_line(error)}"
            log.warning("tracker %s failed (%s); the run goes on without it", kind, how)

    def _write(self, fields: dict[str, Any]) -> None:
        kind, uri = self.settings.kind, self.settings.uri
        tracker = self.tracker = self.tracker or open_logger(
            kind, uri, self.results, self.title, self.run, first_step=0
        )
        event = fields["event"]
        if event == "run_started":
            tracker.write_settings(dict(flatten(fields["settings"])))
        elif event in ("epoch", "step"):
            task = f"{fields['task'].replace(':', '')}/{STEP if event == 'step' else ''}"
            tracker.write(fields[event], {f"{task}{n}": v for n, v in fields["figures"].items()})
        elif event in ("stage_finished", "stage_cached"):
            figures = stage_figures(fields)
            tracker.write(0, {f"{fields['stage']}/{n}": value for n, value in figures.items()})
        elif event == "run_finished":
            tracker.write(0, {f"{name}/test": value for name, value in fields["test"].items()})
            tracker.finish(fields["status"], self.results / "report.html")


def stage_figures(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a `stage_finished` event by name, those that were measured."""
    figures: dict[str, float | None] = {"seconds": fields["seconds"]}
    if fields["measurements"] is not None:
        measured = Measurements.model_validate(fields["measurements"])
        figures |= {**measured.figures, "bytes_ratio": measured.bytes_ratio}
    return {name: float(value) for name, value in figures.items() if value is not None}


def flatten(settings: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings by their dotted names; stages by their own names instead of numbers."""
    if isinstance(settings, dict) and settings:
        for key, value in settings.items():
            yield from flatten(value, f"{place}.{key}" if place else str(key))
    elif isinstance(settings, list) and any(isinstance(value, dict) for value in settings):
        for index, value in enumerate(settings):
            name = value.get("name") or value.get("stage") if place == "stages" else None
            yield from flatten(value, f"{place}.{name or index}")
    else:
        yield place, str(settings)
