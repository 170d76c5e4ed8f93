"""Questions asked in processes of their own, which have only so much time."""

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
"""How long an answer is waited for in all."""


def _answer(
    seconds: int, question: Callable[..., object], arguments: tuple[object, ...], queue
) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: SIM115, PTH123 - the process ends soon
    try:
        queue.put(question(*arguments))
    except Exception as error:  # noqa: BLE001 - whatever a model does is an answer
        queue.put(f"{type(error).__name__}: {error}")


def within(seconds: int, question: Callable[..., object], *arguments: object) -> object:
    """Ask in a process of its own; an error is an answer, and None says that none came.

    Args:
        seconds: what it has of the processor's time, so that a busy machine changes nothing.
        question: what gives the answer.
        arguments: its arguments.
    """
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(
        target=_answer, args=(seconds, question, arguments, queue), daemon=True
    )
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
