"""Standard output kept for one JSON answer."""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

_answers: ContextVar[TextIO] = ContextVar("_answers")
"""Standard output, while everything else is kept away from it."""


@contextmanager
def only_json() -> Iterator[None]:
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


def give(content: object) -> None:
    """Write JSON where it was promised."""
    stream = _answers.get(sys.stdout)
    stream.write(json.dumps(content, indent=1) + "\n")
    stream.flush()
