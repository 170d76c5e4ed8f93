"""Branches as tasks of a Ray cluster, whose nodes share the folder of results."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import ray

from compress.artifacts.artifact import MANIFEST
from compress.common.dependency_recorder import Recording
from compress.common.errors import StageFailed, first_line
from compress.common.process import configured_threads
from compress.common.shared_folder import wait_until_visible
from pipelines.executors.node_environment import REMEDY, RunEnvironment
from pipelines.executors.process_pool import log_here, pickled, run_task
from pipelines.executors.task import TaskResult
from pipelines.system.jsonl_log import log_event
from pipelines.system.signals import insist

if TYPE_CHECKING:
    from pathlib import Path

    from compress.common.errors import CompressError
    from pipelines.executors.task import StageTask

RETRIES = 2
"""Times that a task is begun again after its process has died; a training goes on."""
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_WITHOUT_NODES = 300.0
"""After which no more are expected: a cluster that grows by itself takes minutes."""


@dataclass
class RayTasks:
    """Makes up to so many stages at a time on a cluster."""

    places: int
    threads: int
    """CPU threads of each, which Ray reserves."""
    started: bool
    """Whether the cluster is ours alone and ends with us."""
    environment: RunEnvironment
    """What each node must have as this process does."""
    _begun: dict[ray.ObjectRef[Any], StageTask] = field(default_factory=dict)
    _without_nodes_since: float | None = None

    @classmethod
    def on_cluster(cls, jobs: int | None, store: Path) -> Self:
        """Join the cluster of RAY_ADDRESS, or start one on this machine.

        Args:
            jobs: stages made at a time; by default one for each core.
            store: the run's, in which it has told of itself.

        Raises:
            StageFailed: there is no cluster at the address, or none could be started.
        """
        started = not ray.is_initialized()
        if started:
            _join_or_start()
        cores = _cores_of_nodes()
        places = jobs or max(1, sum(cores))
        threads = configured_threads() or max(1, sum(cores) // places)
        environment = RunEnvironment.of_this_process(store)
        return cls(places, min(threads, max(cores, default=1)), started, environment)

    def submit(self, making: StageTask) -> None:
        """Have a stage made by whichever process of the cluster is free.

        Raises:
            StageFailed: it cannot be sent to another process.
        """
        task = ray.remote(_make).options(num_cpus=self.threads, max_retries=RETRIES)
        level = logging.getLogger().level
        begun = task.remote(making.name, pickled(making), self.environment, level)
        self._begun[begun] = making

    def next(self) -> TaskResult:
        """Wait until a stage that was begun has been made, or has failed."""
        ready: list[ray.ObjectRef[Any]] = []
        while not ready:
            insist()
            ready, _ = ray.wait(list(self._begun), timeout=SECONDS_BETWEEN_LOOKS)
            if not ready and self._has_long_had_no_node():
                return self._given_up()
        making = self._begun.pop(ready[0])
        name, root = making.name, making.context.root
        try:
            seconds, error, recorded, records = ray.get(ready[0])
        except ray.exceptions.RayError as lost:
            return TaskResult(name, 0.0, StageFailed(f"{name}: {_how_it_was_lost(lost)}"))
        for record in records:
            log_here(record, name)
        if error is None and not wait_until_visible(root, (root / MANIFEST).exists):
            why = f"a node has made {root}, which is not seen here; {REMEDY}"
            return TaskResult(name, seconds, StageFailed(f"{name}: {why}"))
        return TaskResult(name, seconds, error, recorded)

    def close(self) -> None:
        """End the tasks under way, and the cluster where it is ours."""
        for task in self._begun:
            ray.cancel(task, force=True)
        if self.started:
            ray.shutdown()

    def _has_long_had_no_node(self) -> bool:
        """Whether no node could make a stage for so long that none will come."""
        if max(_cores_of_nodes(), default=0) >= self.threads:
            self._without_nodes_since = None
            return False
        self._without_nodes_since = self._without_nodes_since or time.monotonic()
        return time.monotonic() - self._without_nodes_since > SECONDS_WITHOUT_NODES

    def _given_up(self) -> TaskResult:
        task, making = self._begun.popitem()
        ray.cancel(task, force=True)
        why = (
            f"the cluster has had no node of {self.threads} cores for {SECONDS_WITHOUT_NODES:.0f} "
            "s; start nodes, and run the same command again"
        )
        return TaskResult(making.name, 0.0, StageFailed(f"{making.name}: {why}"))


def _make(
    name: str, making: bytes, environment: RunEnvironment, level: int
) -> tuple[float, CompressError | None, Recording, list[logging.LogRecord]]:
    """Make a stage; return what :func:`made_of` does, and what was logged."""
    try:
        environment.enter()
    except StageFailed as differs:
        return 0.0, StageFailed(f"{name}: {differs}"), Recording(), []
    told = _Kept()
    root = logging.getLogger()
    root.addHandler(told)
    root.setLevel(min(level, logging.INFO))
    try:
        made = run_task(name, making, lambda *_: None)
    finally:
        root.removeHandler(told)
    return *made, told.records


class _Kept(logging.handlers.QueueHandler):
    """Keeps what is logged, ready to be sent."""

    def __init__(self) -> None:
        self.records: list[logging.LogRecord] = []
        super().__init__(self.records)  # type: ignore[arg-type]  # only `enqueue` uses the queue

    def enqueue(self, record: logging.LogRecord) -> None:
        """Keep what is logged."""
        self.records.append(record)


def _cores_of_nodes() -> list[int]:
    """Return the cores of each node that lives and has any."""
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return [int(resources["CPU"]) for resources in alive if resources.get("CPU", 0) >= 1]


def _join_or_start() -> None:
    # Ray reports its use to its makers unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Left to itself it would join what anybody has started here, or what is dead by now.
    address = os.environ.get("RAY_ADDRESS") or "local"
    before = signal.getsignal(signal.SIGTERM)
    vars(ray._private.worker)["print_to_stdstream"] = _noted
    try:
        ray.init(
            address,
            include_dashboard=False if address == "local" else None,
            configure_logging=False,
            log_to_driver=False,
        )
    except Exception as error:
        where = "on this machine" if address == "local" else address
        raise StageFailed(f"--engine ray: no cluster {where}: {first_line(error)}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has put its own in its place


def _noted(told: dict[str, Any], **_: object) -> None:
    """Log what Ray tells of its dead processes, in dozens of lines that it would print."""
    log_event("message", f"Ray: {' '.join(told['lines'])}", level="warning", stage=None)


def _how_it_was_lost(error: ray.exceptions.RayError) -> str:
    if isinstance(error, ray.exceptions.WorkerCrashedError):
        return f"its process died {RETRIES + 1} times; perhaps memory ran out"
    return f"Ray: {type(error).__name__}: {first_line(error)}"
