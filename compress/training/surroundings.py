"""What the elastic agent and its processes must not change around them, or be told."""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

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
def ranks_deaf_to_ctrl_c() -> Iterator[None]:
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
