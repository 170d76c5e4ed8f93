"""Branches as tasks of a Ray cluster, whose nodes share the folder of results."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ray

from compress.core.cores import told_threads
from compress.core.errors import StageFailed, first_line
from pipelines.interruption import insist
from pipelines.making import Made
from pipelines.workers import log_here, made_of, pickled

if TYPE_CHECKING:
    from compress.core.errors import CompressError
    from pipelines.making import Making

RETRIES = 2
"""Times that a task is begun again after its process has died; a training goes on."""
SECONDS_BETWEEN_LOOKS = 1.0


@dataclass
class RayTasks:
    """Makes up to so many stages at a time on a cluster."""

    places: int
    threads: int
    """CPU threads of each, which Ray reserves."""
    started: bool
    """Whether the cluster is ours alone and ends with us."""
    _names: dict[ray.ObjectRef[Any], str] = field(default_factory=dict)

    @classmethod
    def on_cluster(cls, jobs: int | None) -> Self:
        """Join the cluster of RAY_ADDRESS, or start one on this machine.

        Args:
            jobs: stages made at a time; by default one for each core.

        Raises:
            StageFailed: there is no cluster at the address, or none could be started.
        """
        started = not ray.is_initialized()
        if started:
            _join_or_start()
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        cores = [int(resources["CPU"]) for resources in alive if resources.get("CPU", 0) >= 1]
        places = jobs or max(1, sum(cores))
        threads = told_threads() or max(1, sum(cores) // places)
        return cls(places, min(threads, max(cores, default=1)), started)

    def begin(self, making: Making) -> None:
        """Have a stage made by whichever process of the cluster is free.

        Raises:
            StageFailed: it cannot be sent to another process.
        """
        task = ray.remote(_make).options(num_cpus=self.threads, max_retries=RETRIES)
        here, level = str(Path.cwd()), logging.getLogger().level
        self._names[task.remote(making.name, pickled(making), here, level)] = making.name

    def next(self) -> Made:
        """Wait until a stage that was begun has been made, or has failed."""
        ready: list[ray.ObjectRef[Any]] = []
        while not ready:
            insist()
            ready, _ = ray.wait(list(self._names), timeout=SECONDS_BETWEEN_LOOKS)
        name = self._names.pop(ready[0])
        try:
            seconds, error, records = ray.get(ready[0])
        except ray.exceptions.RayError as lost:
            return Made(name, 0.0, StageFailed(f"{name}: {_how_it_was_lost(lost)}"))
        for record in records:
            log_here(record, name)
        return Made(name, seconds, error)

    def close(self) -> None:
        """End the tasks under way, and the cluster where it is ours."""
        for task in self._names:
            ray.cancel(task, force=True)
        if self.started:
            ray.shutdown()


def _make(
    name: str, making: bytes, folder: str, level: int
) -> tuple[float, CompressError | None, list[logging.LogRecord]]:
    """Make a stage; return the seconds that it took, what went wrong, and what was logged."""
    os.chdir(folder)
    told = _Kept()
    root = logging.getLogger()
    root.addHandler(told)
    root.setLevel(min(level, logging.INFO))
    try:
        seconds, error = made_of(name, making, lambda *_: None)
    finally:
        root.removeHandler(told)
    return seconds, error, told.records


class _Kept(logging.handlers.QueueHandler):
    """Keeps what is logged, ready to be sent."""

    def __init__(self) -> None:
        self.records: list[logging.LogRecord] = []
        super().__init__(self.records)  # type: ignore[arg-type]  # only `enqueue` uses the queue

    def enqueue(self, record: logging.LogRecord) -> None:
        """Keep what is logged."""
        self.records.append(record)


def _join_or_start() -> None:
    # Ray reports its use to its makers unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            include_dashboard=False if "RAY_ADDRESS" not in os.environ else None,
            configure_logging=False,
            log_to_driver=False,
        )
    except Exception as error:
        where = os.environ.get("RAY_ADDRESS", "on this machine")
        raise StageFailed(f"--engine ray: no cluster {where}: {first_line(error)}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has put its own in its place


def _how_it_was_lost(error: ray.exceptions.RayError) -> str:
    if isinstance(error, ray.exceptions.WorkerCrashedError):
        return f"its process died {RETRIES + 1} times; perhaps memory ran out"
    return f"Ray: {type(error).__name__}: {first_line(error)}"
