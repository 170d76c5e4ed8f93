"""The exceptions of this toolkit, their exit codes, and errors as one-line messages.

    CompressError                1
    ├── PipelineInvalid          2   pipeline.yaml or an argument is wrong
    ├── ArtifactInvalid          2   a checkpoint or artifact cannot be read or is not what it says
    ├── StageFailed              1   a stage could not do its work
    ├── GateRefused              3   the work was done and a gate refused its result
    └── Unavailable              4   a library, program or device is missing

The number is the exit code of ``compress``. A message is one line: where, what was found, what was
expected, how to fix it.
"""

from __future__ import annotations

import errno
import logging
import re
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from compress.common.printable import printable

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OUT_OF_MEMORY = re.compile("can't allocate memory|bad_alloc|[Ff]ailed to allocate memory")
"""Messages of torch, the standard library of C++ and ONNX Runtime."""


class CompressError(Exception):
    """Base of all exceptions that this toolkit raises on purpose."""

    exit_code: ClassVar[int] = 1

    def _render_traceback_(self) -> list[str]:
        """Return what IPython prints: a line, or all of the traceback where debug logs are on."""
        if logging.getLogger("compress").isEnabledFor(logging.DEBUG):
            return traceback.format_exception(self)
        return [f"{type(self).__name__}: {line}" for line in cause_lines(self)]


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
    """A library, program or device that a stage needs is missing."""

    exit_code = 4


class SignalExit(SystemExit):
    """A signal asked the process to end; the exit code is 128 plus the signal's number."""


@contextmanager
def exits_refused() -> Iterator[None]:
    """Turn `sys.exit()` and the like in user code into StageFailed; signals still interrupt."""
    # A model, metric or dataset that ends the process would end the run with an exit code of its
    # own choice and without its gates.
    try:
        yield
    except (Exception, KeyboardInterrupt, SignalExit):
        raise
    except BaseException as error:
        raise StageFailed(f"user code {describe_exit(error)}") from error


@contextmanager
def located(place: str, kind: type[CompressError] | None = None, end: str = "") -> Iterator[None]:
    """Let the toolkit's errors in a block begin with a place, end with more, or be of a kind."""
    try:
        yield
    except CompressError as error:
        raise (kind or type(error))(f"{place}{error}{end}") from error


@contextmanager
def raised_as(kind: type[CompressError], what: str, advice: str = "") -> Iterator[None]:
    """Turn what other code raises in a block into an error of a kind; the toolkit's own pass.

    The message says what was tried, what was raised, and what to do.
    """
    try:
        yield
    except CompressError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {first_line(error)}{advice}") from error


def raise_if_resources_ran_out(error: Exception) -> None:
    """Raise StageFailed where a full disk or a lack of memory has caused an error.

    Whatever is tried in place of what failed would fail of that, too.
    """
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        if (
            isinstance(cause, MemoryError)
            or number in (*DISK_FULL_ERRORS, errno.ENOMEM)
            or type(cause).__name__ == "OutOfMemoryError"  # torch's, which is not imported here
            or OUT_OF_MEMORY.search(str(cause))
        ):
            if isinstance(error, CompressError):
                raise error
            what = first_line(cause) or "memory ran out"
            raise StageFailed(f"{type(cause).__name__}: {what}") from error
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def describe_exit(error: BaseException) -> str:
    """Describe how code tried to end the process, with file and line."""
    where, frame = "", error.__traceback__
    while frame is not None:
        where = f" in {Path(frame.tb_frame.f_code.co_filename).name}, line {frame.tb_lineno}"
        frame = frame.tb_next
    if isinstance(error, SystemExit):
        return f"called sys.exit({'' if error.code is None else repr(error.code)}){where}"
    message = f": {first_line(error)}" if str(error) else ""
    return f"raised {type(error).__name__}{message}{where}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; those of libraries can be long."""
    return str(error).strip().partition("\n")[0]


def first_few(texts: Sequence[str], most: int = 3) -> str:
    """List the first of some texts, and say how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{more}"


def describe_exit_code(code: int) -> str:
    """Describe how a process ended by its exit code, which is negative for a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by {name}{'; perhaps memory ran out' if name == 'SIGKILL' else ''}"


def lines_of(message: str) -> list[str]:
    """Split a message with a line per problem of one file; join the lines of any other message."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    file = message.partition(":")[0]
    if all(line.startswith(f"{file}:") for line in lines):
        return lines
    return [" ".join(lines)]


def cause_lines(error: Exception) -> list[str]:
    """Return an error's message and notes as lines for the user, one for each problem."""
    message = str(error)
    if not isinstance(error, CompressError | OSError):
        message = f"internal error, {type(error).__name__}: {error} (--debug shows where)"
    notes = getattr(error, "__notes__", ()) if isinstance(error, CompressError) else ()
    return [printable(line) for line in (*lines_of(message), *notes)]
