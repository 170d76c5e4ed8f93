"""The start of one rank: imports are most of what a short training takes, so they are made fast."""

from __future__ import annotations

import atexit
import gc
import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from compress.common.process import gc_disabled

if TYPE_CHECKING:
    from collections.abc import Iterator


def start_rank(folder: str, agent: int) -> None:
    """Run one rank; the elastic agent calls this in a process of its own.

    Args:
        folder: the training's folder, where the pickled job lies.
        agent: the process that started this one.
    """
    if os.getppid() != agent:  # torch had this process die with its agent, which was dead already
        os._exit(1)
    # Ctrl-C reaches the whole terminal: end without a traceback, the parent tells the story.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with _leaving_at_once():
        with gc_disabled():
            import torch._dynamo  # noqa: F401 - or torch's first optimizer would import it

            from compress.training.launch.worker import run_rank
        gc.freeze()
        run_rank(Path(folder))


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Let this process end without taking the interpreter apart, after all other exit handlers.

    Gloo's threads outlive the process group, which torch itself still refers to. One that lets go
    of a tensor while Python finalizes is ended inside a destructor, and that aborts the process
    ("terminate called without an active exception"): a finished training would seem a failed one.
    """
    codes = [1]
    atexit.register(lambda: os._exit(codes[-1]))  # the first to register is the last to run
    yield
    codes.append(0)
