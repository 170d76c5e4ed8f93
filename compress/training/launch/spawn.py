"""Entry point of a rank's process. Imports take most of a short training: they are made fast."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from compress.common.malloc import keep_freed_memory
from compress.common.process import gc_disabled
from compress.training.launch.rank_environment import LOGS, LocalRanks

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def start_rank(
    index: int, folder: str, ranks: LocalRanks, parent: int, epochs: Connection | None
) -> None:
    """Run one rank, by its index among those that ``parent`` starts, in the new process for it."""
    # torch has the kernel end this process with its parent, which may have died before that.
    if os.getppid() != parent:
        os._exit(1)
    # Ctrl-C reaches the whole terminal: end without a traceback, as the parent reports it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Gloo's threads outlive the process group. One that releases a tensor while Python finalizes is
    # ended inside a destructor, which aborts the process ("terminate called without an active
    # exception"), so that a finished training would look failed. So leave without finalizing.
    exit_codes = [1]
    atexit.register(lambda: os._exit(exit_codes[-1]))  # registered first, so it runs last
    os.environ.update(ranks.environment(index))
    keep_freed_memory()
    # What libraries and the user's code print goes to a file beside the training's state.
    logs = Path(folder) / LOGS
    with suppress(OSError):  # a full disk
        logs.mkdir(exist_ok=True)
        name = f"rank-{ranks.first + index}.log"
        log = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    with gc_disabled():
        import torch._dynamo  # noqa: F401 - or torch's first optimizer would import it

        from compress.training.launch.worker import run_rank
    gc.freeze()
    if run_rank(Path(folder), ranks, index, epochs):
        exit_codes.append(0)
