"""Progress of a run: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from compress.common.printable import printable
from compress.core.progress import progress_bars
from compress.pipelines.system.jsonl_log import LOGGER
from compress.pipelines.system.signals import raise_if_stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compress.core.progress import Progress

SECONDS_BETWEEN_LINES = 3.0
"""Between progress lines where there is no terminal to draw bars on."""


@contextmanager
def show_progress(quiet: bool) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """Provide a progress function, and a function that prints one line per stage."""
    from compress.pipelines.system.rich_output import PlainConsole

    console = PlainConsole(stderr=True)
    if quiet:
        yield (
            (lambda task, done, total, note="": raise_if_stopped()),
            (lambda line: raise_if_stopped()),
        )
    elif console.is_terminal and not console.is_dumb_terminal:

        def announce(line: str) -> None:
            raise_if_stopped()
            console.print(printable(line))

        with progress_bars(console) as draw, _warnings(announce):

            def progress(task: str, done: int, total: int, note: str = "") -> None:
                raise_if_stopped()
                draw(task, done, total, note)

            yield progress, announce
    else:
        with _warnings(_say):
            yield _lines(), _say


class _Announcer(logging.Handler):
    def __init__(self, announce: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self.announce = announce

    def emit(self, record: logging.LogRecord) -> None:
        self.announce(f"warning: {record.getMessage()}")


@contextmanager
def _warnings(announce: Callable[[str], None]) -> Iterator[None]:
    """Print the toolkit's logged warnings during a block, unless `--debug` shows the log anyway."""
    if logging.getLogger().isEnabledFor(logging.WARNING):
        yield
        return
    handler, logger = _Announcer(announce), logging.getLogger(LOGGER)
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


def _lines() -> Progress:
    """Return a progress function that writes a line per new note, or every few seconds."""
    shown: dict[str, tuple[float, str]] = {}

    def progress(task: str, done: int, total: int, note: str = "") -> None:
        now = time.monotonic()
        last_time, last_note = shown.setdefault(task, (now, ""))
        if (note and note != last_note) or now - last_time > SECONDS_BETWEEN_LINES:
            shown[task] = (now, note)
            _say(f"  {task} {done}/{total}{f': {note}' if note else ''}")
        if done >= total:
            del shown[task]

    return progress


def _say(line: str) -> None:
    raise_if_stopped()
    sys.stderr.write(f"{printable(line)}\n")
    sys.stderr.flush()
