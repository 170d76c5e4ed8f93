"""Calls of functions in processes of their own, within a limit of processor time."""

import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from queue import Empty

import torch

MOST_SECONDS = 900
"""How long a result is waited for, by the clock."""


def _call(
    seconds: int, function: Callable[..., object], arguments: tuple[object, ...], queue
) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: SIM115, PTH123 - the process ends soon
    try:
        queue.put(function(*arguments))
    except Exception as error:  # noqa: BLE001 - whatever a model does is a result
        queue.put(f"{type(error).__name__}: {error}")


def within(seconds: int, function: Callable[..., object], *arguments: object) -> object:
    """Return a function's result, or its error as text; None where the limit ended it.

    Args:
        seconds: limit of its processor time, which a busy machine does not change.
        function: called in a forked process.
        arguments: its arguments.
    """
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_call, args=(seconds, function, arguments, queue), daemon=True)
    process.start()
    deadline = time.monotonic() + MOST_SECONDS
    try:
        while time.monotonic() < deadline:
            was_alive = process.is_alive()
            with suppress(Empty):
                return queue.get(timeout=1)
            if not was_alive:
                break
        return None
    finally:
        process.kill()
        process.join()
