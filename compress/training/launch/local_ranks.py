"""Start some ranks of a training on this machine and wait for them; a failure ends all of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import ProcessContext, start_processes

from compress.common.errors import SignalExit, StageFailed
from compress.common.process import end_processes
from compress.training.launch.rank_environment import LOGS, LocalRanks
from compress.training.launch.spawn import start_rank
from compress.training.launch.worker import (
    DEPENDENCIES,
    FINISHED,
    error_of_exit,
    record_failure,
    recorded_failure,
)
from compress.training.loop.metrics import RECORDS, OnRecord

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SECONDS_BETWEEN_POLLS = 1.0
"""Between looks at the store, where ranks of other machines record that they failed."""
SECONDS_TO_END = 5.0  # between SIGTERM and SIGKILL


def run_ranks(
    folder: Path,
    ranks: LocalRanks,
    store: Store,
    on_record: OnRecord,
    raise_if_lost: Callable[[], None] = lambda: None,
) -> str:
    """Run some ranks of a training in processes of their own, until all of them have ended.

    Where rank 0 is among them, ``on_record`` gets its records of steps and epochs, and the result
    is what user code has read, as JSON; elsewhere it is empty. A rank's error is raised wherever it
    failed.
    ``raise_if_lost`` raises once another machine does not answer any more.
    """
    store = PrefixStore(ranks.attempt, store)
    reader, writer = Pipe(duplex=False)
    context = None
    try:
        with _signals_raise():
            arguments = (str(folder), ranks, os.getpid(), writer if ranks.first == 0 else None)
            resource_tracker.ensure_running()  # or it would be started below, and lift the mask
            # Ranks inherit the mask: one that is still importing would print a traceback on Ctrl-C.
            previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                context = start_processes(  # type: ignore[no-untyped-call]
                    start_rank, arguments, ranks.count, join=False
                )
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, previous)
            writer.close()
            _wait(context, ranks, store, folder / LOGS, reader, on_record, raise_if_lost)
    except (KeyboardInterrupt, SystemExit):
        with suppress(RuntimeError):  # the store may have ended before
            record_failure(store, ranks.first, StageFailed(f"rank {ranks.first} was stopped"))
        raise
    finally:
        end_processes(context.processes if context else (), SECONDS_TO_END)
    if failure := recorded_failure(store):
        raise failure
    return store.get(DEPENDENCIES).decode() if ranks.first == 0 else ""


def _wait(
    context: ProcessContext,
    ranks: LocalRanks,
    store: Store,
    logs: Path,
    records: Connection,
    on_record: OnRecord,
    raise_if_lost: Callable[[], None],
) -> None:
    """Return when all processes have ended, or one has failed here or on another machine."""
    running = {process.sentinel: index for index, process in enumerate(context.processes)}
    pipes = [records] if ranks.first == 0 else []
    while running and not recorded_failure(store):
        raise_if_lost()
        for ready in wait([*running, *pipes], SECONDS_BETWEEN_POLLS):
            if ready is records:
                try:
                    on_record(RECORDS.validate_json(records.recv_bytes()))
                except EOFError:
                    pipes = []
                continue
            index = running.pop(ready)
            rank, process = ranks.first + index, context.processes[index]
            process.join()
            # Exit code 0 alone may be user code that ended its process.
            if process.exitcode or not store.check([f"{FINISHED}/{rank}"]):
                log = logs / f"rank-{rank}.log"
                record_failure(store, rank, error_of_exit(rank, process.exitcode, log))
    with suppress(EOFError):  # all that was written has been read
        while pipes and records.poll():
            on_record(RECORDS.validate_json(records.recv_bytes()))


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise SystemExit on signals that would end this process at once, to end its ranks first."""
    # Python sets signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SignalExit(128 + number)  # the shell's code for the signal

    # Not SIGINT, for which Python raises KeyboardInterrupt; and handlers of the caller's stay.
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in numbers:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
