"""A run's events in TensorBoard or MLflow."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from compress.common.errors import first_line
from compress.training.loop.loggers import open_logger
from pipelines.system.jsonl_log import log_handler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from compress.training.loop.loggers import ExperimentLogger
    from pipelines.config.tracker_config import Tracker

REPORT = "report.html"

log = logging.getLogger(__name__)


@contextmanager
def tracked(settings: Tracker, results: Path, pipeline: str, run: str) -> Iterator[None]:
    """Write events to a tracker for a block; one that fails is let go, and the run goes on.

    Args:
        settings: which tracker.
        results: folder that the tracker's is relative to.
        pipeline: name of the pipeline.
        run: name of the run.
    """
    with log_handler(_Writing(settings, results, pipeline, run)):
        yield


class _Writing(logging.Handler):
    """Gives a tracker the events that it is told of."""

    def __init__(self, settings: Tracker, results: Path, pipeline: str, run: str) -> None:
        super().__init__()
        self.kind, self.uri, self.results = settings.kind, settings.uri, results
        self.pipeline, self.run = pipeline, run
        self.tracker: ExperimentLogger | None = None
        self.is_let_go = False

    def emit(self, record: logging.LogRecord) -> None:
        told: dict[str, Any] = getattr(record, "log_fields", {})
        if "event" not in told or self.is_let_go:
            return
        try:
            self._write(told)
        except Exception as error:  # noqa: BLE001 - a server that is gone must not end a run
            self.is_let_go = True
            how = f"{type(error).__name__}: {first_line(error)}"
            log.warning("tracker %s failed (%s); the run goes on without it", self.kind, how)

    def _write(self, told: dict[str, Any]) -> None:
        tracker = self.tracker = self.tracker or open_logger(
            self.kind, self.uri, self.results, f"{self.pipeline}-{self.run}", self.run, first_step=0
        )
        event = told["event"]
        if event == "run_started":
            tracker.write_settings(dict(flat(told["settings"])))
        elif event == "epoch":
            task = told["task"].replace(":", "")
            tracker.write(told["epoch"], {f"{task}/{n}": v for n, v in told["figures"].items()})
        elif event in ("stage_finished", "stage_cached"):
            found = figures_of(told)
            tracker.write(0, {f"{told['stage']}/{name}": value for name, value in found.items()})
        elif event == "run_finished":
            tracker.write(0, {f"{name}/test": value for name, value in told["test"].items()})
            tracker.finish(told["status"], self.results / REPORT)


def figures_of(told: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a finished stage by name, those that it has."""
    found = told["measurements"]
    if found is None:
        return {"seconds": told["seconds"]}
    metric, latency = found["metric"], found["latency_ms"]
    figures = {
        **({metric["name"]: metric["value"]} if metric else {}),
        "bytes": found["bytes"],
        "bytes_ratio": found["bytes_ratio"],
        "parameters": found["parameters"],
        "macs": found["macs"],
        "p50_ms": latency["p50"],
        "p95_ms": latency["p95"],
        "speedup": found["speedup"],
        "peak_mebibytes": found["peak_mebibytes"],
        "seconds": told["seconds"],
    }
    return {name: float(value) for name, value in figures.items() if value is not None}


def flat(settings: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield settings by their dotted names; stages by their own names instead of numbers."""
    if isinstance(settings, dict) and settings:
        for key, value in settings.items():
            yield from flat(value, f"{place}.{key}" if place else str(key))
    elif isinstance(settings, list) and any(isinstance(value, dict) for value in settings):
        for index, value in enumerate(settings):
            name = value.get("name") or value.get("stage") if place == "stages" else None
            yield from flat(value, f"{place}.{name or index}")
    else:
        yield place, str(settings)
