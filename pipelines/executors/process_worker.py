"""The process that runs stages for `--jobs`; :mod:`pipelines.executors.process_pool` starts it."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from pipelines.executors.process_pool import run_task
from pipelines.system import signals


def work(descriptor: int, lifeline: int) -> None:
    """Make one stage after the other until there are no more.

    Args:
        descriptor: of the connection to the run.
        lifeline: of a pipe that ends with the run's process.
    """
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    os.dup2(2, 1)  # standard output is the run's alone
    signals.listen()
    run = _Run(Connection(descriptor))
    logging.getLogger().addHandler(run)
    with suppress(EOFError, signals.Stopped):
        while True:
            name, level, making = run.connection.recv()
            logging.getLogger().setLevel(min(level, logging.INFO))
            run.send("made", run_task(name, making, run.progress))
    os._exit(0)  # nothing is left to be taken apart


class _Run(logging.handlers.QueueHandler):
    """The run, which is told of progress and of what is logged."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)  # type: ignore[arg-type]  # only `enqueue` uses the queue
        self.connection = connection
        self._one_at_a_time = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        """Send a message; an epoch is told of by a thread of its own."""
        with self._one_at_a_time:
            self.connection.send((kind, content))

    def progress(self, task: str, done: int, total: int, note: str = "") -> None:
        """Tell how far a task is."""
        signals.insist()
        self.send("progress", (task, done, total, note))

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send what is logged."""
        self.send("log", record)


def _end_with(lifeline: int) -> None:
    """End this process, and all that it has started, when the run's own has gone."""
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)
