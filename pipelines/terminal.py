"""What the command says to people and machines, and how it ends."""

from __future__ import annotations

import functools
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from compress.core.errors import StageFailed, told_of
from pipelines import answers, interruption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from compress.core.settings import Settings
    from pipelines.report import Report

COLOURS = {"red": 31, "yellow": 33}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Turn the toolkit's errors into one line on standard error and an exit code."""

    @functools.wraps(function)
    def wrapped(*args: Any, debug: bool = False, **kwargs: Any) -> None:
        logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, format="%(message)s")
        try:
            with answers.only_json() if kwargs.get("as_json") else nullcontext():
                function(*args, debug=debug, **kwargs)
        except BaseException as error:  # noqa: BLE001 - a newcomer gets one line, not a traceback
            end(error, debug, resumes=function.__name__ != "serve")

    return wrapped


def end(error: BaseException, debug: bool, resumes: bool) -> NoReturn:
    """Say what went wrong, and end with its exit code."""
    if debug:
        traceback.print_exception(error)
    if interruption.exit_code() or isinstance(error, KeyboardInterrupt):
        say("interrupted; run the same command again to resume" if resumes else "stopped")
        raise SystemExit(interruption.exit_code() or 130) from None
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    if not isinstance(error, Exception):
        raise error
    for line in told_of(error):
        warn(f"error: {line}", "red")
    raise SystemExit(getattr(error, "exit_code", StageFailed.exit_code)) from None


def say(line: str) -> None:
    """Write a line on standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def warn(line: str, colour: str) -> None:
    """Write a line on standard error, coloured on a terminal that is not told otherwise."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    coloured = sys.stderr.isatty() and not plain
    say(f"\x1b[{COLOURS[colour]}m{line}\x1b[0m" if coloured else line)


def tell(
    as_json: bool,
    content: Settings | Mapping[str, Any],
    lines: Iterable[Any],
    table: Callable[[Console], Table] | None = None,
) -> None:
    """Print JSON; or lines for people, below a table where there is one."""
    if as_json:
        mapping = content if isinstance(content, Mapping) else content.model_dump(mode="json")
        answers.give(mapping)
    elif table is not None:
        from pipelines.table import printed

        printed(table, lines)
    else:
        for line in lines:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def show(report: Report, out: Path, as_json: bool, quiet: bool = False) -> None:
    """Print a run's report; nothing where all is to be quiet and no JSON is asked for."""
    from pipelines.table import show_report

    if as_json:
        answers.give(report.model_dump(mode="json"))
    elif not quiet:
        show_report(report, out)
