"""Run stages as tasks of a Ray cluster, whose nodes share the folder of results."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ClassVar, Self

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from compress.artifacts.artifact import MANIFEST
from compress.common.errors import StageFailed, first_line
from compress.common.process import configured_threads
from compress.pipelines.executors.launched import REMEDY, RunEnvironment
from compress.pipelines.executors.task import StageTask, TaskResult, log_here, pickled, run_task
from compress.pipelines.system.jsonl_log import log_event
from compress.pipelines.system.signals import raise_if_stopped
from compress.training.config.parallel import Parallel, nodes_of
from compress.training.launch.rank_group import RankGroup

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

RETRIES = 2
"""Times that a task is run again after its process died; a training resumes from its checkpoint."""
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_NOTICE = 60.0
"""Within which Ray notices that a node is lost, after a training has failed for that."""
SECONDS_WITHOUT_NODES = 300.0
"""Without a node that is large enough, before stages fail: an autoscaler takes minutes."""


@dataclass
class RayTasks:
    """Runs a limited number of stages at a time on a cluster."""

    runs_apart: ClassVar[type] = Parallel
    places: int
    threads: int
    """CPU threads of each stage, which Ray reserves."""
    started: bool
    """Whether this process has started the cluster, and shuts it down."""
    environment: RunEnvironment
    """Folders and packages that each node must have as this process does."""
    _running: dict[ray.ObjectRef[Any], StageTask] = field(default_factory=dict)
    _without_nodes_since: float | None = None

    @classmethod
    def on_cluster(cls, jobs: int | None, store: Path) -> Self:
        """Connect to the cluster of RAY_ADDRESS, or start one, for `jobs` or a stage a core."""
        started = not ray.is_initialized()
        if started:
            # Ray sends usage statistics unless this is 0.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            # Without an address Ray would connect to a cluster that anybody has started on this
            # machine, or to one that has ended.
            address = os.environ.get("RAY_ADDRESS") or "local"
            is_local, before = address == "local", signal.getsignal(signal.SIGTERM)
            vars(ray._private.worker)["print_to_stdstream"] = _log_ray_message
            try:
                ray.init(
                    address,
                    include_dashboard=False if is_local else None,
                    configure_logging=False,
                    log_to_driver=False,
                )
            except Exception as error:
                where = "on this machine" if is_local else address
                why = first_line(error)
                raise StageFailed(f"--engine ray: no cluster {where}: {why}") from error
            finally:
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, before)  # which Ray has replaced
        cores = _cores_of_nodes()
        places = jobs or max(1, sum(cores))
        threads = configured_threads() or max(1, sum(cores) // places)
        environment = RunEnvironment.of_this_process(store)
        return cls(places, min(threads, max(cores, default=1)), started, environment)

    def submit(self, stage_task: StageTask) -> None:
        """Run a stage in whichever process is free; on several nodes if it trains on these."""
        arguments = (stage_task.name, pickled(stage_task), self.environment)
        level, nodes = logging.getLogger().level, nodes_of(stage_task.stage)
        remote: Any  # tasks of two kinds
        if nodes == (1, 1):
            remote = ray.remote(_run_on_node).options(num_cpus=self.threads, max_retries=RETRIES)
            running = remote.remote(*arguments, level)
        else:
            remote = ray.remote(_run_on_nodes).options(num_cpus=0, max_retries=RETRIES)
            running = remote.remote(*arguments, level, *nodes, self.threads)
        self._running[running] = stage_task

    def next(self) -> TaskResult:
        """Wait for the next submitted stage that succeeds or fails."""
        from compress.training.launch.worker import wait_until_visible  # it imports torch

        ready: list[ray.ObjectRef[Any]] = []
        while not ready:
            raise_if_stopped()
            ready, _ = ray.wait(list(self._running), timeout=SECONDS_BETWEEN_LOOKS)
            if ready:
                break
            found = _nodes_with(self.threads)
            needs = {task: nodes_of(t.stage)[0] for task, t in self._running.items()}
            task = max(needs, key=needs.__getitem__)
            if found >= needs[task]:
                self._without_nodes_since = None
                continue
            self._without_nodes_since = self._without_nodes_since or time.monotonic()
            if time.monotonic() - self._without_nodes_since > SECONDS_WITHOUT_NODES:
                stage_task = self._running.pop(task)
                ray.cancel(task, force=True)
                few = f"{found} of {needs[task]} nodes" if needs[task] > 1 else "no node"
                why = (
                    f"the cluster has had {few} of {self.threads} cores for "
                    f"{SECONDS_WITHOUT_NODES:.0f} s; start nodes, and run the same command again"
                )
                return TaskResult.failed(stage_task.name, why)
        stage_task = self._running.pop(ready[0])
        name, root = stage_task.name, stage_task.context.root
        try:
            result: TaskResult
            result, records = ray.get(ready[0])
        except ray.exceptions.WorkerCrashedError:
            why = f"its process died {RETRIES + 1} times; perhaps memory ran out"
            return TaskResult.failed(name, why)
        except ray.exceptions.RayError as lost:
            return TaskResult.failed(name, f"Ray: {type(lost).__name__}: {first_line(lost)}")
        for record in records:
            log_here(record, name)
        if result.error is None and not wait_until_visible(root, (root / MANIFEST).exists):
            why = f"a node has written {root}, which is not visible here; {REMEDY}"
            return TaskResult.failed(name, why)
        return result

    def close(self) -> None:
        """Cancel running tasks, and shut down the cluster if this process started it."""
        # Without force a task gets a KeyboardInterrupt, which user code may catch.
        for task in self._running:
            ray.cancel(task, force=True)
        if self.started:
            ray.shutdown()


def _run_on_node(
    name: str, pickled_task: bytes, environment: RunEnvironment, level: int
) -> tuple[TaskResult, list[logging.LogRecord]]:
    """Run a stage in a Ray process; return the result of :func:`run_task`, and its log records."""
    try:
        environment.enter()
    except StageFailed as error:
        return TaskResult.failed(name, str(error)), []
    # Its records can be pickled, others not: QueueHandler formats their arguments.
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    collector = logging.handlers.QueueHandler(records)
    root = logging.getLogger()
    root.addHandler(collector)
    root.setLevel(min(level, logging.INFO))
    try:
        result = run_task(name, pickled_task, lambda *_: None)
    finally:
        root.removeHandler(collector)
    return result, [records.get() for _ in range(records.qsize())]


class _Node:
    """One of the processes of a stage that trains on several nodes, as torchrun would start it."""

    def address(self) -> tuple[str, str]:
        """Return this node's address, and a port that is free on it."""
        with socket.socket() as free:
            free.bind(("", 0))
            host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            return host, str(free.getsockname()[1])

    def run(self, rank: int, nodes: int, server: tuple[str, str], *arguments: Any) -> Any:
        """Run the stage as rank 0; as another one take part in its trainings, and return None."""
        numbers = {"RANK": rank, "WORLD_SIZE": nodes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        meeting = dict(zip(("MASTER_ADDR", "MASTER_PORT"), server, strict=True))
        group = RankGroup.join({name: str(number) for name, number in numbers.items()} | meeting)
        if rank:
            arguments[2].enter()  # the folders of the run
            group.serve(lambda request: "")
            return None
        try:
            return _run_on_node(*arguments)
        finally:
            group.leave(0)


def _run_on_nodes(
    name: str,
    pickled_task: bytes,
    environment: RunEnvironment,
    level: int,
    fewest: int,
    most: int,
    threads: int,
) -> Any:
    """Run a stage by an actor on each of some nodes; again, from its checkpoint, if one is lost."""
    label = f"{environment.run_id}-{name}"
    for tries_left in reversed(range(RETRIES + 1)):
        with suppress(ValueError):  # of a process of this function that died
            ray.util.remove_placement_group(ray.util.get_placement_group(label))
        places, nodes = _reserve_nodes(label, fewest, most, threads)
        try:
            start = ray.remote(_Node).options
            actors: list[Any] = [
                start(
                    num_cpus=threads,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(places, bundle),
                ).remote()
                for bundle in range(nodes)
            ]
            server = ray.get(actors[0].address.remote())
            arguments = (nodes, server, name, pickled_task, environment, level)
            runs = [actor.run.remote(rank, *arguments) for rank, actor in enumerate(actors)]
            waiting = [*runs]
            while runs[0] in waiting:
                (ended,), waiting = ray.wait(waiting)
                try:
                    result = ray.get(ended)
                except ray.exceptions.RayTaskError:
                    if ended == runs[0]:
                        raise
                    # It has lost rank 0, whose own end says why.
            # Where a node is lost, that is the cause of the error.
            with suppress(ray.exceptions.RayTaskError, ray.exceptions.GetTimeoutError):
                if result[0].error is not None:
                    ray.get(waiting, timeout=SECONDS_TO_NOTICE)
            return result
        except ray.exceptions.RayActorError:
            if not tries_left:
                raise
        finally:
            ray.util.remove_placement_group(places)  # ends the actors
    raise AssertionError


def _reserve_nodes(label: str, fewest: int, most: int, threads: int) -> tuple[PlacementGroup, int]:
    """Reserve threads of as many nodes as there are, at least the fewest, once these are free.

    Ray counts a lost node for some seconds after its actors have failed, so nodes are counted again
    while a reservation waits: it would wait forever for a node that is not there.
    """
    while True:
        nodes = max(fewest, min(most, _nodes_with(threads)))
        bundles = [{"CPU": threads}] * nodes
        places = ray.util.placement_group(bundles, strategy="STRICT_SPREAD", name=label)
        while nodes <= max(fewest, _nodes_with(threads)):
            if places.wait(SECONDS_BETWEEN_LOOKS):
                return places, nodes
        ray.util.remove_placement_group(places)


def _nodes_with(threads: int) -> int:
    return sum(cores >= threads for cores in _cores_of_nodes())


def _cores_of_nodes() -> list[int]:
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return [int(resources["CPU"]) for resources in alive if resources.get("CPU", 0) >= 1]


def _log_ray_message(message: dict[str, Any], **_: object) -> None:
    """Write to the run's log what Ray would print of its dead processes, dozens of lines."""
    log_event("message", f"Ray: {' '.join(message['lines'])}", level="warning", stage=None)
