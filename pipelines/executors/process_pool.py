"""Processes of this machine that make stages side by side, each with a share of the threads."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from compress.common.dependency_recorder import Recording
from compress.common.errors import CompressError, StageFailed, describe_exit_code, first_line
from compress.common.process import THREADS, configured_threads, usable_cores
from compress.core.progress import silent
from pipelines.executors.task import TaskResult
from pipelines.system.signals import insist, only_signals_interrupt

if TYPE_CHECKING:
    from compress.core.progress import Progress
    from pipelines.executors.task import StageTask

SECONDS_TO_END = 10.0
"""For a worker to clean up when the run is interrupted."""
COMMAND = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from pipelines.executors.process_worker import work; work(*map(int, sys.argv[2:]))"
)


def threads_each(jobs: int) -> int:
    """Return how many CPU threads each of several processes computes with.

    The cores divided, but what OMP_NUM_THREADS says holds for each of them as it does for one.
    """
    return configured_threads() or max(1, usable_cores() // jobs)


@dataclass
class ProcessPool:
    """Makes up to so many stages at a time."""

    places: int
    progress: Progress
    lock: int | None = None
    """Descriptor of the store's lock: workers of a killed run hold it until they have ended."""
    _workers: list[_Worker] = field(default_factory=list)

    def submit(self, making: StageTask) -> None:
        """Have a stage made; at most ``places`` at a time.

        Raises:
            StageFailed: it cannot be sent to another process.
        """
        luggage = pickled(making)
        idle = [worker for worker in self._workers if not worker.name]
        if not idle:
            idle = [_Worker(threads_each(self.places), self.lock)]
            self._workers += idle
        idle[0].submit(making.name, luggage)

    def next(self) -> TaskResult:
        """Wait until a stage that was begun has been made, or has failed."""
        while True:
            busy = {worker.connection: worker for worker in self._workers if worker.name}
            for ready in wait(busy):
                worker = busy[ready]  # type: ignore[index]
                made = worker.read_message(self.progress)
                if worker.process.returncode is not None:
                    self._workers.remove(worker)
                if made is not None:
                    return made

    def close(self) -> None:
        """End all workers, and what they have started; busy ones may clean up first."""
        try:
            for worker in self._workers:
                if worker.name:
                    worker.process.terminate()
            for worker in self._workers:
                if worker.name:
                    with suppress(subprocess.TimeoutExpired):
                        worker.process.wait(SECONDS_TO_END)
        finally:
            for worker in self._workers:
                worker.end()


class _Worker:
    """One process; it ends when this one does, however that ends."""

    def __init__(self, threads: int, lock: int | None) -> None:
        self.connection, theirs = Pipe()
        # Nothing is ever written here: the worker learns of our end by the end of this pipe.
        lifeline, self._lifeline = os.pipe()
        passed = [theirs.fileno(), lifeline] + ([] if lock is None else [lock])
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, json.dumps(sys.path), *map(str, passed[:2])],
            env=os.environ | {THREADS: str(threads)},
            pass_fds=passed,
            start_new_session=True,  # a Ctrl-C of the terminal ends it through us
        )
        theirs.close()
        os.close(lifeline)
        self.name = ""
        """The stage that it makes; empty while it waits."""

    def submit(self, name: str, making: bytes) -> None:
        self.name = name
        with suppress(BrokenPipeError):  # it is dead, and will be heard to be
            self.connection.send((name, logging.getLogger().level, making))

    def read_message(self, progress: Progress) -> TaskResult | None:
        """Take in a message; return what was made, if that is what it says."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, OSError):
            return self._died()
        if kind == "progress":
            self._show(progress, *content)
        elif kind == "log":
            log_here(content, self.name)
        else:
            name, self.name = self.name, ""
            return TaskResult(name, *content)
        return None

    def end(self) -> None:
        """Kill the process and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        os.close(self._lifeline)

    def _show(self, progress: Progress, task: str, done: int, total: int, note: str) -> None:
        # Branches do the same tasks side by side.
        named = task if task.startswith(self.name) else f"{self.name}: {task}"
        progress(named, done, total, note)

    def _died(self) -> TaskResult:
        name, self.name = self.name, ""
        self.end()
        how = f"its process {describe_exit_code(self.process.returncode)}"
        return TaskResult(name, 0.0, StageFailed(f"{name}: {how}"))


def pickled(making: StageTask) -> bytes:
    """Return a making for another process, without what only this one has.

    Raises:
        StageFailed: it cannot be sent.
    """
    context = replace(making.context, progress=silent, scores={})
    try:
        return pickle.dumps(replace(making, context=context))
    except Exception as error:
        raise StageFailed(
            f"{making.name}: cannot be sent to another process ({type(error).__name__}: "
            f"{first_line(error)}); run it with --jobs 1"
        ) from error


def run_task(
    name: str, making: bytes, progress: Progress
) -> tuple[float, CompressError | None, Recording]:
    """Make a stage in the process that it was sent to.

    Returns:
        The seconds that it took, what went wrong, and what user code read meanwhile.
    """
    try:
        with only_signals_interrupt():
            unpickled: StageTask = pickle.loads(making)
            _, seconds, recorded = unpickled(progress)
    except CompressError as error:
        insist()
        logging.getLogger(__name__).debug("%s failed", name, exc_info=True)
        return 0.0, error, Recording()
    except Exception as error:  # noqa: BLE001 - the run tells it
        insist()
        failed = StageFailed(f"{name}: {type(error).__name__}: {first_line(error)}")
        return 0.0, failed, Recording()
    return seconds, None, recorded


def log_here(record: logging.LogRecord, stage: str) -> None:
    """Log what another process has logged while it made a stage."""
    record.log_fields = {
        "stage": stage,
        **vars(record).get("log_fields", {}),
    }  # as pipelines.system.jsonl_log has it
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)
