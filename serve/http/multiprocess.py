"""Several server processes behind one socket: Python runs one thread at a time in each."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from compress.common.errors import CompressError, StageFailed, cause_lines
from compress.common.process import end_processes, end_with_parent

if TYPE_CHECKING:
    Ready = Callable[[], None]

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Folder of each process's counters, from which all can be summed; prometheus_client reads the
variable at import."""
KILL_SECONDS = 10.0  # time for a process to cancel its requests, and to end its threads


def run(count: int, child: Callable[[Ready], None], ready: Ready, stop_seconds: float) -> None:
    """Run a function in `count` processes, until one of them ends or this one is interrupted.

    Each runs `child`, which calls its argument once it answers requests; `ready` is called here
    once all answer. They end within `stop_seconds` of SIGTERM, or shortly after get SIGKILL. SIGHUP
    is passed on to them.
    """
    fork = get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    processes = [fork.Process(target=_run, args=(child, writer, os.getpid())) for _ in range(count)]

    def pass_on(number: int, _: object) -> None:
        for process in processes:
            if process.pid and process.is_alive():
                os.kill(process.pid, number)

    with tempfile.TemporaryDirectory(prefix="serve-metrics-") as folder:
        os.environ[METRICS_VARIABLE] = folder
        try:
            for process in processes:
                process.start()
            signal.signal(signal.SIGHUP, pass_on)
            while reader in wait([reader, *(process.sentinel for process in processes)]):
                reader.recv_bytes()
                count -= 1
                if not count:
                    ready()
            raise StageFailed("a process of the server ended by itself")
        finally:
            started = [process for process in processes if process.pid]
            end_processes(started, stop_seconds + KILL_SECONDS)


def _run(child: Callable[[Ready], None], ready: Connection[Any, Any], parent: int) -> None:
    end_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it has loaded what it would load again
    try:
        if os.getppid() == parent:  # it may have ended before
            child(lambda: ready.send_bytes(b"ready"))
    except KeyboardInterrupt:
        pass
    except CompressError as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in cause_lines(error)))
        sys.exit(1)
