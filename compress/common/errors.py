"""Everything this toolkit raises on purpose.

    CompressError                1
    ├── PipelineInvalid          2   pipeline.yaml or an argument is wrong
    ├── ArtifactInvalid          2   a checkpoint or artifact cannot be read or is not what it says
    ├── StageFailed              1   a stage could not do its work
    ├── GateRefused              3   the work was done and a gate refused its result
    └── Unavailable              4   a library, program or device is missing

The number is the exit code of ``compress``. A message says where, what was found, what was expected
and how to mend it, in one line.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator

from compress.common.printable import printable


class CompressError(Exception):
    """Root of the tree; catch this to catch everything the toolkit refuses."""

    exit_code: ClassVar[int] = 1


class PipelineInvalid(CompressError):
    """The pipeline file or an argument is wrong; nothing was run."""

    exit_code = 2


class ArtifactInvalid(CompressError):
    """A file is missing, truncated, altered or belongs to another model."""

    exit_code = 2


class StageFailed(CompressError):
    """A stage could not do its work."""


class GateRefused(CompressError):
    """A stage's result exists, and a gate refused it."""

    exit_code = 3


class Unavailable(CompressError):
    """A library, program or device that a stage needs is not here."""

    exit_code = 4


class SignalExit(SystemExit):
    """A signal asked the process to end; its code is the shell's for that signal."""


@contextmanager
def exits_refused() -> Iterator[None]:
    """Let no code within a block end the process: `sys.exit()` in user code is a failure.

    A model, a metric or a dataset that ends the process would end the run with an exit code of its
    own choice, with no gate judged. Signals still interrupt.

    Raises:
        StageFailed: in place of SystemExit and whatever else is no Exception.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, SignalExit):
        raise
    except BaseException as error:
        raise StageFailed(f"user code {describe_exit(error)}") from error


def describe_exit(error: BaseException) -> str:
    """Return in words how code tried to end the process."""
    where, frame = "", error.__traceback__
    while frame is not None:
        where = f" in {Path(frame.tb_frame.f_code.co_filename).name}, line {frame.tb_lineno}"
        frame = frame.tb_next
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)}){where}"
    words = f": {first_line(error)}" if str(error) else ""
    return f"raised {type(error).__name__}{words}{where}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error of another library says."""
    return str(error).strip().partition("\n")[0]


def describe_exit_code(code: int) -> str:
    """Return how a process ended, in words, by its exit code; negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}{'; perhaps memory ran out' if name == 'SIGKILL' else ''}"


def lines_of(message: str) -> list[str]:
    """Return a line per problem of a file; any other message is one line, whatever it holds."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    file = message.partition(":")[0]
    if all(line.startswith(f"{file}:") for line in lines):
        return lines
    return [" ".join(lines)]


def cause_lines(error: Exception) -> list[str]:
    """Return what a user is told of an error and of those that it notes: one line per problem."""
    message = str(error)
    if not isinstance(error, CompressError | OSError):
        message = f"internal error, {type(error).__name__}: {error} (--debug shows where)"
    notes = getattr(error, "__notes__", ()) if isinstance(error, CompressError) else ()
    return [printable(line) for line in (*lines_of(message), *notes)]
