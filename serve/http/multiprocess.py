"""Several processes behind one socket: Python runs one thread at a time in each."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from compress.common.errors import CompressError, StageFailed, cause_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    Ready = Callable[[], None]

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Where processes keep their counters, so that each can tell the sums; read at import."""
POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1


def run(count: int, child: Callable[[Ready], None], ready: Ready, stop_seconds: float) -> None:
    """Run a function in so many processes, until one of them or this one is told to stop.

    Args:
        count: number of processes.
        child: what each runs; it calls what it is given once it answers.
        ready: called here once all answer.
        stop_seconds: how long they may take to end after SIGTERM.

    Raises:
        StageFailed: one of them ended by itself; the others are stopped.
    """
    reading, writing = os.pipe()
    pids: set[int] = set()
    with tempfile.TemporaryDirectory(prefix="serve-metrics-") as folder:
        os.environ[METRICS_VARIABLE] = folder
        try:
            for _ in range(count):
                pids.add(_fork(child, writing))
            os.close(writing)
            told = 0
            while not _reap(pids):
                if told < count and select.select([reading], [], [], POLL_SECONDS)[0]:
                    told += len(os.read(reading, count))
                    if told == count:
                        ready()
                elif told == count:
                    time.sleep(POLL_SECONDS)
            raise StageFailed("a process of the server ended by itself")
        finally:
            os.close(reading)
            _end(pids, stop_seconds)


def _fork(child: Callable[[Ready], None], writing: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        _become(child, writing, parent)
    return pid


def _become(child: Callable[[Ready], None], writing: int, parent: int) -> NoReturn:
    code = 1
    try:
        # A parent that is killed must not leave us behind.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() == parent:
            child(lambda: _signal_ready(writing))
        code = 0
    except KeyboardInterrupt:
        code = 0
    except CompressError as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in cause_lines(error)))
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - nothing may return into the parent's code
        traceback.print_exc()
    finally:
        os._exit(code)


def _signal_ready(writing: int) -> None:
    with suppress(OSError):
        os.write(writing, b"r")


def _reap(pids: set[int]) -> bool:
    """Whether a process has ended; such are forgotten."""
    ended = {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}
    pids -= ended
    return bool(ended)


def _end(pids: set[int], stop_seconds: float) -> None:
    """End processes, politely first."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    due = time.monotonic() + stop_seconds
    while pids and time.monotonic() < due:
        _reap(pids)
        time.sleep(POLL_SECONDS)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
