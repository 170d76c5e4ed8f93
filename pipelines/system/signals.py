"""Signals that ask the command to stop: each surfaces once, and is never mistaken for a failure."""

from __future__ import annotations

import gc
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from compress.common.errors import StageFailed, describe_exit, exits_refused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

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
    """Ignore the signals from here on: the work is done, and Python is about to end."""
    gc.freeze()  # or it would look through all that torch is once more, for half a second
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def exit_code() -> int | None:
    """Return the shell's code for the first signal, or None where there was none.

    An import that is interrupted may turn the exception into another one, so that any error after
    a signal counts as an interruption.
    """
    return 128 + _received[0] if _received else None


@contextmanager
def only_signals_interrupt() -> Iterator[None]:
    """Let user code within a block neither end the process nor pretend an interruption.

    Raises:
        StageFailed: in place of SystemExit and the like, and of a KeyboardInterrupt that no signal
            has caused. Where signals are not listened to nobody knows, and it interrupts.
    """
    try:
        with exits_refused():
            yield
    except KeyboardInterrupt as error:
        if _received or signal.getsignal(signal.SIGINT) is not _stop:
            raise
        raise StageFailed(f"user code {describe_exit(error)}") from error


def add_interruption_note(error: BaseException, stages: Sequence[str]) -> str:
    """Note on what an interruption raised which stages it came at; return that in words."""
    words = f"{INTERRUPTED} at {', '.join(stages)}" if stages else INTERRUPTED
    error.add_note(words)
    return words


def describe_interruption(error: BaseException) -> str:
    """Return an interruption in words: where it came, as far as that was noted."""
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
