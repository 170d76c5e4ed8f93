"""What the elastic agent and its processes must not change around them, or be told."""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.api import MultiprocessContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

if TYPE_CHECKING:
    from collections.abc import Iterator

# SIGINT is left to Python, so that it is a KeyboardInterrupt here as everywhere.
SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT")
AGENT_LOGS = ("distributed.elastic", "multiprocessing.spawn")


@contextmanager
def quiet() -> Iterator[None]:
    """End the elastic agent's logging at its own roots: it warns of each process that it ends."""
    nowhere = logging.NullHandler()
    roots = {name: logging.getLogger(f"torch.{name}") for name in AGENT_LOGS}
    propagated = {name: root.propagate for name, root in roots.items()}
    for root in roots.values():
        root.addHandler(nowhere)
        root.propagate = False
    try:
        yield
    finally:
        for name, root in roots.items():
            root.propagate = propagated[name]
            root.removeHandler(nowhere)


@contextmanager
def own_signals() -> Iterator[None]:
    """Put back the signal handlers, which the elastic agent replaces and leaves replaced."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}
    try:
        yield
    finally:
        for name, handler in handlers.items():
            signal.signal(getattr(signal, name), handler)


@contextmanager
def ranks_ignore_sigint() -> Iterator[None]:
    """Keep a Ctrl-C from ranks that are still importing, which would each print a traceback.

    Processes inherit the mask of the thread that starts them. Here, a thread started before takes
    the signal, and Python raises KeyboardInterrupt in the main thread as ever.
    """
    resource_tracker.ensure_running()  # or it would be started below, and lift the mask
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def exits_noticed() -> Iterator[None]:
    """Let the elastic agent see a rank that ended with exit code 0 before its training was over.

    It would wait for that rank's return value forever (torch 2.13). A rank that has returned ends
    only once the agent has its value, so an ended one without a value never returned.
    """
    poll = MultiprocessContext._poll

    def poll_and_look(context: MultiprocessContext) -> RunProcsResult | None:
        result = poll(context)
        processes = context._pc.processes if context._pc and result is None else []
        for rank, process in enumerate(processes):
            if process.exitcode == 0 and rank not in context._return_values:
                failure = ProcessFailure(rank, process.pid, 0, context.error_files[rank])
                context.close()
                return RunProcsResult({}, {rank: failure}, context.stdouts, context.stderrs)
        return result

    setattr(MultiprocessContext, "_poll", poll_and_look)  # noqa: B010 - mypy forbids to assign it
    try:
        yield
    finally:
        setattr(MultiprocessContext, "_poll", poll)  # noqa: B010


@contextmanager
def own_rendezvous_store() -> Iterator[None]:
    """Give each round a store of its own (a shared one hangs restarts: pytorch issue 135712)."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    previous = {key: os.environ.get(key) for key in (name, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ[name] = "1"
    try:
        yield
    finally:
        for key, value in previous.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
