"""Ctrl-C, SIGTERM and SIGHUP: raised as `Stopped`, and reported as interruptions, not failures."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from compress.common.errors import CompressError, StageFailed, describe_exit, exits_refused

INTERRUPTED: Final = "interrupted"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_received: list[int] = []


class Stopped(KeyboardInterrupt):
    """A signal asked the command to stop; `with` blocks clean up on its way out."""


def install_handlers() -> None:
    """Raise :class:`Stopped` on Ctrl-C, SIGTERM and SIGHUP, unless the parent had them ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)


def ignore_signals() -> None:
    """Ignore further signals while Python shuts down."""
    if "triton" in sys.modules:  # torch's CUDA builds have it
        gc.unfreeze()  # version 3.9 reports on thirty lines what is not collected as leaked
    else:
        gc.freeze()  # else the final collection scans all of torch's objects, for half a second
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def exit_code() -> int | None:
    """Return 128 + the number of the first signal, whatever was raised after it, or None."""
    # An interrupted import may raise another exception instead: any error counts as interruption.
    return 128 + _received[0] if _received else None


def interruption_code(error: BaseException) -> int:
    """Return the exit code of an interruption; 0 for other errors."""
    return exit_code() or (130 if isinstance(error, KeyboardInterrupt) else 0)


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of an error; never 0, even if a user's error class says so."""
    code = error.exit_code if isinstance(error, CompressError) else 0
    return interruption_code(error) or code or StageFailed.exit_code


@contextmanager
def only_signals_interrupt() -> Iterator[None]:
    """Turn SystemExit and a KeyboardInterrupt of user code within a block into StageFailed."""
    try:
        with exits_refused():
            yield
    except KeyboardInterrupt as error:
        # Where signals are not listened to, nobody knows whether one has caused it.
        if _received or signal.getsignal(signal.SIGINT) is not _stop:
            raise
        raise StageFailed(f"user code {describe_exit(error)}") from error


def describe_interruption(error: BaseException) -> str:
    """Return an interruption's note, such as `interrupted at train`."""
    notes = (n for n in getattr(error, "__notes__", ()) if n.startswith(INTERRUPTED))
    return next(notes, INTERRUPTED)


def raise_if_stopped() -> None:
    """Raise :class:`Stopped` again where a library swallowed it."""
    if _received:
        raise Stopped


def _stop(number: int, _frame: FrameType | None) -> None:
    # A terminal that closes sends SIGHUP and more: only a second Ctrl-C may disturb the clean-up.
    if not _received or number == signal.SIGINT:
        _received.append(number)
        raise Stopped
