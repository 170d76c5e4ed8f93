"""The process that runs stages for `--jobs`; ``engines`` starts it."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from compress.common.malloc import keep_freed_memory
from compress.common.printable import escape_warnings
from compress.pipelines.executors.task import run_task
from compress.pipelines.system import signals


def work(descriptor: int, lifeline: int) -> None:
    """Run the stages that arrive until the connection closes; pipe `lifeline` ends with the run."""

    def die_with_parent() -> None:
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)  # with the children

    threading.Thread(target=die_with_parent, daemon=True).start()
    os.dup2(2, 1)  # standard output is the run's alone
    keep_freed_memory()
    signals.install_handlers()
    escape_warnings()
    run = _RunConnection(Connection(descriptor))
    logging.getLogger().addHandler(run)
    with suppress(EOFError, signals.Stopped):
        while True:
            name, level, task = run.connection.recv()
            logging.getLogger().setLevel(min(level, logging.INFO))
            run.send("result", run_task(name, task, run.progress))
    os._exit(0)  # without the interpreter's teardown: nothing is left to clean up


class _RunConnection(logging.handlers.QueueHandler):
    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)  # type: ignore[arg-type]  # only `enqueue` uses the queue
        self.connection = connection
        self._send_lock = threading.Lock()

    def send(self, kind: str, content: Any) -> None:
        """Send a message; several threads may, as training reports epochs from its own."""
        with self._send_lock:
            self.connection.send((kind, content))

    def progress(self, task: str, done: int, total: int, note: str = "") -> None:
        """Send the progress of a task."""
        signals.raise_if_stopped()
        self.send("progress", (task, done, total, note))

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a log record."""
        self.send("log", record)
