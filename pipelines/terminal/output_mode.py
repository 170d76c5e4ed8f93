"""Output mode of a command: text, or JSON with standard output reserved for it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class OutputMode:
    """Options `--json` and `--quiet` of the running command."""

    as_json: bool = False
    quiet: bool = False
    """Print errors only; with `as_json` the JSON is printed all the same."""
    json_printed: bool = False
    """Whether the command has printed its JSON."""

    @property
    def silent(self) -> bool:
        """Whether progress, notices and warnings are off."""
        return self.as_json or self.quiet


_mode: ContextVar[OutputMode] = ContextVar("_mode")
_json_stream: ContextVar[TextIO] = ContextVar("_json_stream")
"""The real standard output, while file descriptor 1 is redirected to standard error."""


def current_mode() -> OutputMode:
    """Return the running command's output mode; text if there is none."""
    return _mode.get(OutputMode())


@contextmanager
def use_mode(mode: OutputMode) -> Iterator[None]:
    """Set the output mode for a block."""
    token = _mode.set(mode)
    try:
        with _reserve_stdout_for_json() if mode.as_json else nullcontext():
            yield
    finally:
        _mode.reset(token)


@contextmanager
def _reserve_stdout_for_json() -> Iterator[None]:
    """Reserve standard output for JSON: what user code prints goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as json_stream:
        token = _json_stream.set(json_stream)
        os.dup2(2, 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(json_stream.fileno(), 1)
            _json_stream.reset(token)


def print_json(content: object, indent: int | None = 1) -> None:
    """Write JSON to the real standard output."""
    stream = _json_stream.get(sys.stdout)
    stream.write(json.dumps(content, indent=indent) + "\n")
    stream.flush()
    current_mode().json_printed = True
