"""Runs several stages at a time: in worker processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import json
import logging
import logging.handlers
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from compress.common.errors import PipelineInvalid, describe_exit_code
from compress.common.process import THREADS, configured_threads, usable_cores
from compress.common.requirements import Requirement, pip_install, require_all, undisturbed
from compress.pipelines.executors.task import StageTask, TaskResult, log_here, pickled
from compress.training.config.parallel import Parallel, nodes_of
from compress.training.launch.rank_group import nodes_by_engine

if TYPE_CHECKING:
    from compress.core.progress import Progress
    from compress.pipelines.config.pipeline import PipelineConfig
    from compress.pipelines.config.run_options import EngineName
    from compress.pipelines.executors.ray import RayTasks
    from compress.pipelines.store.local import Store

SECONDS_TO_END = 10.0  # for a worker to clean up when the run is interrupted
COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from compress.pipelines.executors.process_worker import work; work(*map(int, sys.argv[2:]))"
)
Engine: TypeAlias = "ProcessPool | RayTasks"
RAY = Requirement(what="ray", install=f"{pip_install('ray')}, or leave --engine out")


def threads_each(jobs: int) -> int:
    """Return the CPU threads of each of some processes: OMP_NUM_THREADS, or the cores divided."""
    return configured_threads() or max(1, usable_cores() // jobs)


@dataclass
class ProcessPool:
    """Runs up to `places` stages at a time, each in a worker process of this machine."""

    runs_apart: ClassVar[tuple[()]] = ()
    """Settings that ask for no other stage beside theirs, and that it fulfils in another way."""
    places: int
    progress: Progress
    lock: int | None = None
    """Descriptor of the store's lock: workers of a killed run hold it until they have ended."""
    _workers: list[_Worker] = field(default_factory=list)

    def submit(self, task: StageTask) -> None:
        """Send a stage to an idle worker; at most ``places`` at a time."""
        content = pickled(task)
        idle = [worker for worker in self._workers if not worker.name]
        if not idle:
            idle = [_Worker(threads_each(self.places), self.lock)]
            self._workers += idle
        idle[0].submit(task.name, content)

    def next(self) -> TaskResult:
        """Wait until a submitted stage has finished or failed."""
        while True:
            busy = {worker.connection: worker for worker in self._workers if worker.name}
            for ready in wait(busy):
                worker = busy[ready]  # type: ignore[index]
                result = worker.read_message(self.progress)
                if worker.process.returncode is not None:
                    self._workers.remove(worker)
                if result is not None:
                    return result

    def close(self) -> None:
        """End all workers and their child processes; busy ones may clean up first."""
        busy = [worker for worker in self._workers if worker.name]
        try:
            for worker in busy:
                worker.process.terminate()
            for worker in busy:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(SECONDS_TO_END)
        finally:
            for worker in self._workers:
                worker.end()


class _Worker:
    """A worker process, which ends when this process does, even if this one is killed."""

    def __init__(self, threads: int, lock: int | None) -> None:
        self.connection, theirs = Pipe()
        # Nothing is ever written here: the worker learns of our end by the end of this pipe.
        lifeline, self._lifeline = os.pipe()
        passed = [theirs.fileno(), lifeline] + ([] if lock is None else [lock])
        self.process = subprocess.Popen(
            # The worker finds user code in the same folders.
            [sys.executable, "-c", COMMAND, json.dumps(sys.path), *map(str, passed[:2])],
            # OpenMP reads it once, when torch is imported.
            env=os.environ | {THREADS: str(threads)},
            pass_fds=passed,
            start_new_session=True,  # a Ctrl-C of the terminal ends it through us
        )
        theirs.close()
        os.close(lifeline)
        self.name = ""  # the stage that it runs; empty while it waits

    def submit(self, name: str, task: bytes) -> None:
        self.name = name
        with suppress(BrokenPipeError):  # it is dead, which `read_message` will find out
            self.connection.send((name, logging.getLogger().level, task))

    def read_message(self, progress: Progress) -> TaskResult | None:
        """Show progress and log records as they arrive; return the result once it does."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError):
            name, self.name = self.name, ""
            self.end()
            return TaskResult.failed(
                name, f"its process {describe_exit_code(self.process.returncode)}"
            )
        if kind == "progress":
            task, done, total, note = content
            # Branches do the same tasks at the same time: only the stage's name tells them apart.
            title = task if task.startswith(self.name) else f"{self.name}: {task}"
            progress(title, done, total, note)
        elif kind == "log":
            log_here(content, self.name)
        else:
            self.name = ""
            result: TaskResult = content
            return result
        return None

    def end(self) -> None:
        """Kill the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        os.close(self._lifeline)


def check_engine(pipeline: PipelineConfig, name: EngineName) -> None:
    """Refuse an engine that is not installed, or a GPU, which was not tried with Ray."""
    nodes_by_engine.set(name == "ray")
    if name != "ray":
        return
    require_all([RAY], "--engine ray")
    for planned in pipeline.stages:
        if nodes_of(planned)[1] > 1 and undisturbed(planned, Parallel):
            raise PipelineInvalid(
                f"{planned.title}: measures latency, and trains on several nodes, which --engine "
                "ray has in stages that measure none; leave --engine out, and start torchrun"
            )
    if pipeline.device != "cpu":
        raise PipelineInvalid(
            f"{pipeline.place('device')}: --engine ray runs on `device: cpu` alone, found "
            f"{pipeline.device!r}; use --jobs"
        )


def engine_for(
    name: EngineName, jobs: int | None, store: Store, progress: Progress
) -> Engine | None:
    """Start what runs several stages at a time; None where this process runs one after another."""
    if name == "ray":
        from compress.pipelines.executors.ray import RayTasks

        return RayTasks.on_cluster(jobs, store.root)
    return ProcessPool(jobs, progress, store.lock) if jobs and jobs > 1 else None
