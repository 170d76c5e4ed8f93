"""Start some ranks of a training on this machine and wait for them; a failure ends all of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, resource_tracker
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import start_processes

from compress.common.errors import SignalExit, StageFailed
from compress.training.launch.spawn import start_rank
from compress.training.launch.worker import DEPENDENCIES, FINISHED
from compress.training.launch.worker_errors import error_of_exit, record_failure, recorded_failure
from compress.training.loop.step_metrics import EpochMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path
    from types import FrameType

    from torch._C._distributed_c10d import Store
    from torch.multiprocessing.spawn import ProcessContext

    from compress.training.launch.rank_environment import LocalRanks

SECONDS_BETWEEN_POLLS = 1.0
"""Between looks at the store, where ranks of other machines record that they failed."""
SECONDS_TO_END = 5.0
"""Between SIGTERM and SIGKILL."""


def run_ranks(
    folder: Path, ranks: LocalRanks, store: Store, on_epoch: Callable[[EpochMetrics], None]
) -> str:
    """Run some ranks of a training in processes of their own, until all of them have ended.

    Args:
        folder: the training's folder, which holds the pickled job.
        ranks: which to start here.
        store: the one that `ranks` names.
        on_epoch: called after each epoch where rank 0 is among them.

    Returns:
        What user code has read, as JSON; nothing where rank 0 is elsewhere.

    Raises:
        CompressError: a rank failed, here or on another machine.
    """
    store = PrefixStore(ranks.attempt, store)
    reader, writer = Pipe(duplex=False)
    context = None
    try:
        with _signals_raise():
            # Ranks inherit the mask: one that is still importing would print a traceback on Ctrl-C.
            with _sigint_blocked():
                arguments = (str(folder), ranks, os.getpid(), writer if ranks.first == 0 else None)
                context = start_processes(  # type: ignore[no-untyped-call]
                    start_rank, arguments, ranks.count, join=False
                )
            writer.close()
            _wait(context, ranks, store, reader, on_epoch)
    except (KeyboardInterrupt, SystemExit):
        with suppress(RuntimeError):  # the store may have ended before
            record_failure(store, ranks.first, StageFailed(f"rank {ranks.first} was stopped"))
        raise
    finally:
        if context:
            _end(context)
    if failure := recorded_failure(store):
        raise failure
    return store.get(DEPENDENCIES).decode() if ranks.first == 0 else ""


def _wait(
    context: ProcessContext,
    ranks: LocalRanks,
    store: Store,
    epochs: Connection,
    on_epoch: Callable[[EpochMetrics], None],
) -> None:
    """Return when all processes have ended, or one has failed here or on another machine."""
    running = {process.sentinel: index for index, process in enumerate(context.processes)}
    pipes = [epochs] if ranks.first == 0 else []
    while running and not recorded_failure(store):
        for ready in wait([*running, *pipes], SECONDS_BETWEEN_POLLS):
            if ready is epochs:
                try:
                    on_epoch(EpochMetrics.model_validate_json(epochs.recv_bytes()))
                except EOFError:
                    pipes = []
                continue
            index = running.pop(ready)
            rank, process = ranks.first + index, context.processes[index]
            process.join()
            if process.exitcode or not store.check([f"{FINISHED}/{rank}"]):
                record_failure(store, rank, error_of_exit(rank, process.exitcode))
    with suppress(EOFError):  # all that was written has been read
        while pipes and epochs.poll():
            on_epoch(EpochMetrics.model_validate_json(epochs.recv_bytes()))


def _end(context: ProcessContext) -> None:
    """End the processes that still run."""
    for process in context.processes:
        process.terminate()
    deadline = time.monotonic() + SECONDS_TO_END
    for process in context.processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()  # does nothing where it has ended
        process.join()


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Put off Ctrl-C to the end of a block."""
    resource_tracker.ensure_running()  # or it would be started below, and lift the mask
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise SystemExit on signals that would end this process at once, so that it ends its ranks.

    Handlers that the caller has set stay. SIGINT is left to Python, which raises KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SignalExit(128 + number)  # the shell's code for the signal

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
