"""How a command answers: lines for people, or one JSON answer for which standard output is kept."""

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
    """What a command was asked to print."""

    as_json: bool = False
    quiet: bool = False
    """Errors alone; an answer in JSON is printed all the same."""
    json_printed: bool = False
    """Whether JSON was printed."""

    @property
    def silent(self) -> bool:
        """Whether nothing is told to people on the way."""
        return self.as_json or self.quiet


_manner: ContextVar[OutputMode] = ContextVar("_manner")
_answers: ContextVar[TextIO] = ContextVar("_answers")
"""Standard output, while everything else is kept away from it."""


def current_mode() -> OutputMode:
    """Return how the command at hand answers; without one, in lines for people."""
    return _manner.get(OutputMode())


@contextmanager
def use_mode(asked: OutputMode) -> Iterator[None]:
    """Let a command answer in some manner for a block."""
    token = _manner.set(asked)
    try:
        with _reserve_stdout_for_json() if asked.as_json else nullcontext():
            yield
    finally:
        _manner.reset(token)


@contextmanager
def _reserve_stdout_for_json() -> Iterator[None]:
    """Keep standard output for the answer: what user code writes there goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        token = _answers.set(answers)
        os.dup2(2, 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(answers.fileno(), 1)
            _answers.reset(token)


def print_json(content: object, indent: int | None = 1) -> None:
    """Write JSON where it was promised."""
    stream = _answers.get(sys.stdout)
    stream.write(json.dumps(content, indent=indent) + "\n")
    stream.flush()
    current_mode().json_printed = True
