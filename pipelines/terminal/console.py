"""Output of commands (text or JSON), errors and exit codes, and progress: bars or plain lines."""

from __future__ import annotations

import functools
import gc
import inspect
import io
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from compress.common.errors import CompressError, Unavailable, cause_lines, exits_refused
from compress.common.printable import escape_warnings, printable
from compress.common.process import gc_disabled
from compress.core.progress import Progress, progress_bars
from compress.pipelines.system import signals
from compress.pipelines.system.signals import raise_if_stopped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from compress.common.config import Settings
    from compress.pipelines.results.schema import Report

RED, YELLOW = "\x1b[31m", "\x1b[33m"
SECONDS_BETWEEN_LINES = 3.0  # between progress lines where there is no terminal to draw bars on


@dataclass
class OutputMode:
    """Options `--json` and `--quiet` of the running command."""

    as_json: bool = False
    quiet: bool = False
    """Print errors only; with `as_json` the JSON is printed all the same."""
    json_printed: bool = False
    json_stream: TextIO | None = None
    """The real standard output, while file descriptor 1 is redirected to standard error."""

    @property
    def silent(self) -> bool:
        """Whether progress, notices and warnings are off."""
        return self.as_json or self.quiet


class _Output(io.FileIO):
    """A file descriptor whose reader may leave, as in `| head`: what a command did stays done."""

    def write(self, content: Any, /) -> int:
        """Write bytes; nowhere once the pipe is broken."""
        try:
            return super().write(content)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return memoryview(content).nbytes


def _open_output(
    descriptor: int, encoding: str, line_buffering: bool = False, closefd: bool = True
) -> TextIO:
    raw = io.BufferedWriter(_Output(descriptor, "w", closefd))
    # An ASCII terminal must not end a run.
    return io.TextIOWrapper(raw, encoding, errors="replace", line_buffering=line_buffering)


_mode: ContextVar[OutputMode] = ContextVar("_mode")


def current_mode() -> OutputMode:
    """Return the running command's output mode; text if there is none."""
    return _mode.get(OutputMode())


@contextmanager
def use_mode(mode: OutputMode) -> Iterator[None]:
    """Set the output mode for a block; for JSON, reserve standard output."""
    token = _mode.set(mode)
    try:
        if not mode.as_json:
            yield
            return
        sys.stdout.flush()
        with _open_output(os.dup(1), "utf-8") as mode.json_stream:
            os.dup2(2, 1)  # what user code and its libraries print goes to standard error
            try:
                yield
            finally:
                sys.stdout.flush()
                os.dup2(mode.json_stream.fileno(), 1)
    finally:
        _mode.reset(token)


def print_json(content: object, indent: int | None = 1) -> None:
    """Write JSON to the real standard output."""
    stream = current_mode().json_stream or sys.stdout
    stream.write(json.dumps(content, indent=indent) + "\n")
    stream.flush()
    current_mode().json_printed = True


@contextmanager
def fast_imports() -> Iterator[None]:
    """Skip garbage collection during imports in a block.

    Imported objects live until the end, so they are frozen out of the collector.
    """
    with gc_disabled():
        try:
            yield
        finally:
            gc.freeze()


class _ImportNotice(MetaPathFinder):
    """Says on a terminal what is being imported, before the first second is over."""

    def __init__(self) -> None:
        self.notices = {"compress.core.stage": "importing the stages", "torch": "importing torch"}

    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        """Find nothing: other finders do."""
        if (notice := self.notices.pop(name, None)) and sys.stderr.isatty():
            notify(notice)


def run_app(app: Callable[[], Any]) -> NoReturn:
    """Run the command line and exit with its code, or with a signal's."""
    signals.install_handlers()
    escape_warnings()
    sys.meta_path.insert(0, _ImportNotice())
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            by_line = stream.line_buffering or stream.write_through
            wrapped = _open_output(stream.fileno(), stream.encoding, by_line, closefd=False)
            setattr(sys, name, wrapped)
    try:
        app()
        raise SystemExit
    except SystemExit as end:
        # No command ran that could print a usage error, which typer has printed, as JSON.
        error: Any = end.__context__
        if hasattr(error, "format_message") and "--json" in sys.argv:
            lines = [error.format_message()]
            found = {"kind": type(error).__name__, "exit_code": end.code, "lines": lines}
            print_json({"error": found})
        raise SystemExit(signals.exit_code() or end.code) from None
    finally:
        signals.ignore_signals()


def wrap_command(function: Callable[..., None], options: Mapping[str, Any]) -> Callable[..., None]:
    """Wrap a command: common `options`, unknown to it, errors as one line, exit codes."""

    @functools.wraps(function)
    def wrapped(*args: Any, as_json: bool, quiet: bool, debug: bool, **kwargs: Any) -> None:
        from compress.pipelines.system.rich_output import PlainFormatter

        handler = logging.StreamHandler()
        handler.setFormatter(PlainFormatter())
        logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, handlers=[handler])
        mode = OutputMode(as_json=as_json, quiet=quiet)
        try:
            with use_mode(mode):
                try:
                    with exits_refused(), _required_packages():
                        function(*args, **kwargs)
                except BaseException as error:
                    if as_json and not mode.json_printed:
                        kind, code = "Interrupted", signals.interruption_code(error)
                        lines = [signals.describe_interruption(error)]
                        if not code and isinstance(error, Exception):
                            kind, lines = type(error).__name__, cause_lines(error)
                            code = signals.exit_code_of(error)
                        print_json({"error": {"kind": kind, "exit_code": code, "lines": lines}})
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


@contextmanager
def _required_packages() -> Iterator[None]:
    # What stages need besides, they refuse by themselves.
    try:
        yield
    except ModuleNotFoundError as error:
        advice = "which is not installed; compress doctor says what is missing"
        raise Unavailable(f"needs {error.name}, {advice}") from error


def exit_with_error(error: BaseException, debug: bool, resumes: bool) -> NoReturn:
    """Print an error as text, with `debug` after its traceback, and exit with its code."""
    if debug:
        print_to_stderr("".join(traceback.format_exception(error)).rstrip())
    if code := signals.interruption_code(error):
        what = f"{signals.describe_interruption(error)}; run the same command again to resume"
        print_to_stderr(what if resumes else "stopped")
        raise SystemExit(code) from None
    if not isinstance(error, Exception):
        raise error
    for line in cause_lines(error):
        print_to_stderr(f"error: {line}", RED)
    raise SystemExit(signals.exit_code_of(error)) from None


def print_to_stderr(line: str, colour: str = "") -> None:
    """Write a line on standard error, coloured on a terminal unless NO_COLOR is set."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    line = printable(line)
    if colour and sys.stderr.isatty() and not plain:
        line = f"{colour}{line}\x1b[0m"
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def notify(line: str) -> None:
    """Write a line on standard error, unless `--quiet` or `--json` was given."""
    if not current_mode().silent:
        print_to_stderr(line)


def get_prompter() -> Callable[[str, str, Callable[[str], object]], str] | None:
    """Return the function that prompts for an option; None without a terminal."""
    return _prompt if sys.stdin.isatty() and not current_mode().silent else None


def _prompt(question: str, default: str, check: Callable[[str], object]) -> str:
    while True:
        sys.stderr.write(printable(f"{question}{f' [{default}]' if default else ''} "))
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

    The JSON includes the warnings, else they go to standard error; `indent` None makes it one line.
    """
    mode = current_mode()
    for line in () if mode.silent else warnings:
        print_to_stderr(f"warning: {line}", YELLOW)
    if mode.as_json:
        mapping = content if isinstance(content, Mapping) else content.model_dump(mode="json")
        print_json(mapping, indent)
    elif mode.quiet:
        return
    elif table is not None:
        from compress.pipelines.reporting.terminal_table import print_table

        print_table(table, lines)
    else:
        for line in lines:
            sys.stdout.write(f"{printable(str(line))}\n")
        sys.stdout.flush()


def print_report(report: Report, out: Path, error_follows: bool = False) -> None:
    """Print a report as JSON or table unless `--quiet`; with `error_follows` without its error."""
    from compress.pipelines.config.model_spec import SOURCE
    from compress.pipelines.reporting.terminal_table import closing_lines, print_table, stage_table

    if current_mode().as_json:
        print_json(report.model_dump(mode="json"))
    # Where importing the model failed, there is no table: the error says why.
    elif not current_mode().quiet and not (
        report.failed_stage and report.failed_stage.name == SOURCE and not report.stages
    ):
        repeated = report.error if error_follows else ""
        lines = (line for line in closing_lines(report, out) if line.plain != f"✗ {repeated}")
        print_table(functools.partial(stage_table, report), lines)


@contextmanager
def show_progress() -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """Provide a progress function, and one that prints a line; neither prints in a silent mode."""
    from compress.pipelines.system.rich_output import PlainConsole

    console = PlainConsole(stderr=True)
    if current_mode().silent:
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
    from compress.pipelines.system.jsonl_log import log_handler

    is_shown = logging.getLogger().isEnabledFor(logging.WARNING)
    with nullcontext() if is_shown else log_handler(_Announcer(announce)):
        yield


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
    print_to_stderr(line)
