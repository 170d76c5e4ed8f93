"""A run's events in TensorBoard or MLflow."""

from __future__ import annotations

import logging
import os
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from compress.common.errors import first_line
from compress.training.loop.loggers import MLflow, TensorBoard, place_of
from pipelines.system.jsonl_log import log_handler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pipelines.config.tracker_config import Tracker

REPORT = "report.html"
MOST_PARAMETERS = 100
"""That MLflow takes at a time."""
LONGEST_VALUE = 500
NOT_IN_NAMES = re.compile(r"[^\w/. :-]")
STATUS = {"passed": "FINISHED", "interrupted": "KILLED"}
"""MLflow's words for how a run ended; the others are FAILED."""

log = logging.getLogger(__name__)


class RunTracker(Protocol):
    """What writes settings, figures and the report of a run."""

    def write(self, epoch: int, figures: Mapping[str, float]) -> None:
        """Write figures of a step."""
        ...

    def settings(self, settings: Mapping[str, str]) -> None:
        """Write what was set."""
        ...

    def end(self, status: str, report: Path) -> None:
        """Write how the run ended, and keep its report, which may not be there."""
        ...


class Board(TensorBoard):
    """A folder with an event file, and the report beside it."""

    def __init__(self, folder: Path) -> None:
        """Begin a run."""
        super().__init__(folder, done=-1)
        self.folder = folder

    def settings(self, settings: Mapping[str, str]) -> None:
        """Write a table."""
        rows = "\n".join(f"| {name} | {value} |" for name, value in settings.items())
        self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}")

    def end(self, status: str, report: Path) -> None:
        """Copy the report, and close."""
        self.writer.add_text("status", status)
        self.close()
        if report.exists():
            shutil.copyfile(report, self.folder / REPORT)


class Server(MLflow):
    """A run of MLflow, with the report as its artifact."""

    def settings(self, settings: Mapping[str, str]) -> None:
        """Write parameters."""
        from mlflow.entities import Param

        found = [Param(allowed(n), value[:LONGEST_VALUE]) for n, value in settings.items()]
        for begin in range(0, len(found), MOST_PARAMETERS):
            self.client.log_batch(self.run, params=found[begin : begin + MOST_PARAMETERS])

    def write(self, epoch: int, figures: Mapping[str, float]) -> None:
        """Send figures of a step."""
        super().write(epoch, {allowed(name): value for name, value in figures.items()})

    def end(self, status: str, report: Path) -> None:
        """Send the report, and end the run."""
        if report.exists():
            self.client.log_artifact(self.run, str(report))
        self.client.set_terminated(self.run, status=STATUS.get(status, "FAILED"))


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
        self.tracker: RunTracker | None = None
        self.is_let_go = False

    def emit(self, record: logging.LogRecord) -> None:
        told: dict[str, Any] = getattr(record, "told", {})
        if "event" not in told or self.is_let_go:
            return
        try:
            self._write(told)
        except Exception as error:  # noqa: BLE001 - a server that is gone must not end a run
            self.is_let_go = True
            how = f"{type(error).__name__}: {first_line(error)}"
            log.warning("tracker %s failed (%s); the run goes on without it", self.kind, how)

    def _write(self, told: dict[str, Any]) -> None:
        tracker = self.tracker = self.tracker or self._opened()
        event = told["event"]
        if event == "run_started":
            tracker.settings(dict(flat(told["settings"])))
        elif event == "epoch":
            task = told["task"].replace(":", "")
            tracker.write(told["epoch"], {f"{task}/{n}": v for n, v in told["figures"].items()})
        elif event in ("stage_finished", "stage_cached"):
            found = figures_of(told)
            tracker.write(0, {f"{told['stage']}/{name}": value for name, value in found.items()})
        elif event == "run_finished":
            tracker.write(0, {f"{name}/test": value for name, value in told["test"].items()})
            tracker.end(told["status"], self.results / REPORT)

    def _opened(self) -> RunTracker:
        name = f"{self.pipeline}-{self.run}"
        place = place_of(self.kind, self.uri, self.results)
        if self.kind == "tensorboard":
            return Board((place.folder or self.results) / name)
        # Or it would try again for minutes where nobody answers.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
        return Server(place, self.run, name, done=0)


def allowed(name: str) -> str:
    """Return a name as MLflow takes it; a branch's has an equal sign, which it refuses."""
    return NOT_IN_NAMES.sub(":", name)


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
