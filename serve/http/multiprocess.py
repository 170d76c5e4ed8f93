"""Several server processes behind one socket: Python runs one thread at a time in each."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from compress.common.errors import CompressError, StageFailed, cause_lines

if TYPE_CHECKING:
    Ready = Callable[[], None]

METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Folder of each process's counters, from which all can be summed; prometheus_client reads the
variable at import."""
POLL_SECONDS = 0.05
KILL_SECONDS = 10.0  # time for a process to cancel its requests, and to end its threads
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def run(count: int, child: Callable[[Ready], None], ready: Ready, stop_seconds: float) -> None:
    """Run a function in `count` processes, until one of them ends or this one is interrupted.

    Each runs `child`, which calls its argument once it answers requests; `ready` is called here
    once all answer. They end within `stop_seconds` of SIGTERM, or shortly after get SIGKILL. SIGHUP
    is passed on to them.
    """

    def pass_on(number: int, _: object) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    read_end, write_end = os.pipe()
    pids: set[int] = set()
    with tempfile.TemporaryDirectory(prefix="serve-metrics-") as folder:
        os.environ[METRICS_VARIABLE] = folder
        try:
            for _ in range(count):
                pids.add(_fork(child, write_end))
            signal.signal(signal.SIGHUP, pass_on)
            os.close(write_end)
            ready_count = 0
            while not _reap(pids):
                if ready_count < count and select.select([read_end], [], [], POLL_SECONDS)[0]:
                    ready_count += len(os.read(read_end, count))
                    if ready_count == count:
                        ready()
                elif ready_count == count:
                    time.sleep(POLL_SECONDS)
            raise StageFailed("a process of the server ended by itself")
        finally:
            os.close(read_end)
            _stop(pids, stop_seconds)


def _fork(child: Callable[[Ready], None], write_end: int) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid

    def report_ready() -> None:
        with suppress(OSError):
            os.write(write_end, b"r")

    code = 1
    try:
        end_with_parent(signal.SIGTERM)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it has loaded what it would load again
        if os.getppid() == parent:  # it may have ended before
            child(report_ready)
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


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent ends, even if that is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))


def _reap(pids: set[int]) -> bool:
    """Remove processes that have ended from the set; return whether there were any."""
    ended = {pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]}
    pids -= ended
    return bool(ended)


def _stop(pids: set[int], stop_seconds: float) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + stop_seconds + KILL_SECONDS
    while pids and time.monotonic() < deadline:
        _reap(pids)
        time.sleep(POLL_SECONDS)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
