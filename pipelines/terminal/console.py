"""Output of commands (text or JSON), errors and exit codes."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from compress.common.errors import CompressError, StageFailed, cause_lines, exits_refused
from compress.common.printable import printable
from pipelines.system import signals
from pipelines.system.signals import describe_interruption
from pipelines.terminal import output_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from rich.console import Console
    from rich.table import Table

    from compress.common.config import Settings
    from pipelines.results.schema import Report

COLOURS = {"red": 31, "yellow": 33}


def run_app(app: Callable[[], Any]) -> NoReturn:
    """Run the command line and exit with its code, or with a signal's."""
    signals.install_handlers()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal must not end a run
    try:
        app()
        raise SystemExit
    except SystemExit as end:
        _print_usage_error_as_json(end)
        raise SystemExit(signals.exit_code() or end.code) from None
    finally:
        signals.ignore_signals()


def _print_usage_error_as_json(end: SystemExit) -> None:
    """Print a usage error as JSON if `--json` was given: no command ran that could do it."""
    error = end.__context__  # click's usage error, which typer has printed
    format_message = getattr(error, "format_message", None)
    if format_message and "--json" in sys.argv:
        found = {"kind": type(error).__name__, "exit_code": end.code, "lines": [format_message()]}
        output_mode.print_json({"error": found})


def wrap_command(function: Callable[..., None], options: Mapping[str, Any]) -> Callable[..., None]:
    """Wrap a command: common options, errors as one line on standard error, exit codes.

    Args:
        function: a command.
        options: annotations of `as_json`, `quiet` and `debug`, which every command takes; they
            decide how :func:`tell` answers, and the command itself need not know them.
    """

    @functools.wraps(function)
    def wrapped(*args: Any, as_json: bool, quiet: bool, debug: bool, **kwargs: Any) -> None:
        _log_to_terminal(logging.DEBUG if debug else logging.ERROR)
        try:
            with output_mode.use_mode(output_mode.OutputMode(as_json=as_json, quiet=quiet)):
                try:
                    with exits_refused():
                        function(*args, **kwargs)
                except BaseException as error:
                    _print_error_as_json(error)
                    raise
        except BaseException as error:  # noqa: BLE001 - users get one line, not a traceback
            exit_with_error(error, debug, resumes=function.__name__ != "serve")

    signature = inspect.signature(function, eval_str=True)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in options.items()
    ]
    signed: Any = wrapped
    signed.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *added])
    return wrapped


def _log_to_terminal(level: int) -> None:
    """Log to standard error from a level on, unless logging is configured already."""
    from pipelines.system.rich_output import PlainFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(PlainFormatter())
    logging.basicConfig(level=level, handlers=[handler])


def _print_error_as_json(error: BaseException) -> None:
    """Print an error as JSON if `--json` was given and no JSON was printed yet."""
    mode = output_mode.current_mode()
    if mode.json_printed or not mode.as_json or isinstance(error, BrokenPipeError):
        return
    kind, code, lines = "Interrupted", _interrupted(error), [describe_interruption(error)]
    if not code and isinstance(error, Exception):
        kind, code, lines = type(error).__name__, _exit_code(error), cause_lines(error)
    found = {"kind": kind, "exit_code": code, "lines": lines}
    output_mode.print_json({"error": found})


def exit_with_error(error: BaseException, debug: bool, resumes: bool) -> NoReturn:
    """Print an error as text and exit with its code.

    Args:
        error: the error or interruption.
        debug: whether the traceback is printed, too.
        resumes: whether the same command continues after an interruption.
    """
    if debug:
        print_to_stderr("".join(traceback.format_exception(error)).rstrip())
    if code := _interrupted(error):
        print_to_stderr(
            f"{describe_interruption(error)}; run the same command again to resume"
            if resumes
            else "stopped"
        )
        raise SystemExit(code) from None
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    if not isinstance(error, Exception):
        raise error
    for line in cause_lines(error):
        print_coloured(f"error: {line}", "red")
    raise SystemExit(_exit_code(error)) from None


def _interrupted(error: BaseException) -> int:
    """Return the exit code of an interruption; 0 for other errors."""
    return signals.exit_code() or (130 if isinstance(error, KeyboardInterrupt) else 0)


def _exit_code(error: Exception) -> int:
    """Return the exit code of an error; never 0, even if a user's error class says so."""
    code = error.exit_code if isinstance(error, CompressError) else 0
    return code or StageFailed.exit_code


def print_to_stderr(line: str) -> None:
    """Write a line on standard error."""
    sys.stderr.write(f"{printable(line)}\n")
    sys.stderr.flush()


def print_coloured(line: str, colour: str) -> None:
    """Write a line on standard error, coloured on a terminal unless NO_COLOR is set."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    coloured = sys.stderr.isatty() and not plain
    line = printable(line)
    sys.stderr.write(f"\x1b[{COLOURS[colour]}m{line}\x1b[0m\n" if coloured else f"{line}\n")
    sys.stderr.flush()


def notify(line: str) -> None:
    """Write a line on standard error, unless `--quiet` or `--json` was given."""
    if not output_mode.current_mode().silent:
        print_to_stderr(line)


def get_prompter() -> Callable[[str, str, Callable[[str], object]], str] | None:
    """Return the function that prompts for an option; None without a terminal."""
    return _prompt if sys.stdin.isatty() and not output_mode.current_mode().silent else None


def _prompt(question: str, default: str, check: Callable[[str], object]) -> str:
    """Prompt on standard error until the check accepts the answer."""
    while True:
        sys.stderr.write(printable(f"{question}{f' [{default}]' if default else ''}: "))
        sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:  # Ctrl-D
            raise KeyboardInterrupt
        try:
            check(answer := line.strip() or default)
        except CompressError as error:
            print_to_stderr(str(error))
        else:
            return answer


def print_result(
    content: Settings | Mapping[str, Any],
    lines: Iterable[Any],
    table: Callable[[Console], Table] | None = None,
    indent: int | None = 1,
    warnings: Iterable[str] = (),
) -> None:
    """Print a command's result: as JSON, as lines (below a table), or not at all with `--quiet`.

    Args:
        content: the JSON content, which includes the warnings.
        lines: the text.
        table: makes a table for a console, printed above the lines.
        indent: of the JSON; None prints one line.
        warnings: lines for standard error; not printed with `--json` or `--quiet`.
    """
    for line in () if output_mode.current_mode().silent else warnings:
        print_coloured(f"warning: {line}", "yellow")
    if output_mode.current_mode().as_json:
        mapping = content if isinstance(content, Mapping) else content.model_dump(mode="json")
        output_mode.print_json(mapping, indent)
    elif output_mode.current_mode().quiet:
        return
    elif table is not None:
        from pipelines.reporting.terminal_table import print_table

        print_table(table, lines)
    else:
        for line in lines:
            sys.stdout.write(f"{printable(str(line))}\n")
        sys.stdout.flush()


def print_report(report: Report, out: Path) -> None:
    """Print a run's report as JSON or as a table; nothing with `--quiet`."""
    from pipelines.reporting.terminal_table import show_report

    if output_mode.current_mode().as_json:
        output_mode.print_json(report.model_dump(mode="json"))
    elif not output_mode.current_mode().quiet:
        show_report(report, out)
