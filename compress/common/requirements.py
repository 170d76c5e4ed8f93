"""What other packages provide: libraries and programs that a stage needs, and entry points."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING, Any

from compress.common.config import Settings
from compress.common.errors import Unavailable, exits_refused

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import EntryPoint


class Requirement(Settings):
    """A library or program that a stage needs."""

    what: str
    """A Python module, or a program on the PATH."""
    install: str
    """How to install it, for the error message."""
    program: bool = False
    """Whether it is a program. A missing library is reported before the run, a missing program by
    its own stage, after the stages before it."""

    def missing(self) -> bool:
        """Whether it cannot be found."""
        if self.program:
            return shutil.which(self.what) is None
        return importlib.util.find_spec(self.what.partition(".")[0]) is None


COMPILER = Requirement(
    what=(os.environ.get("CXX") or "g++").split()[0],
    program=True,
    install="a C++ compiler, e.g. apt-get install g++",
)
"""The compiler that TorchInductor calls."""


def requirements_of(settings: Settings) -> Iterator[Requirement]:
    """Yield the requirements of settings and of nested settings."""
    yield from getattr(settings, "requirements", ())
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Settings):
            yield from requirements_of(value)


def undisturbed(settings: Settings) -> bool:
    """Whether settings or nested ones declare, by this name, that no job may run beside them."""
    values = (getattr(settings, name) for name in type(settings).model_fields)
    nested = (value for value in values if isinstance(value, Settings))
    return bool(getattr(settings, "undisturbed", False)) or any(map(undisturbed, nested))


def load_entry_point(entry: EntryPoint, kind: str) -> Any:
    """Import the `stage`, `gate` or `observer` that a package announces, or raise Unavailable."""
    try:
        with exits_refused():
            return entry.load()
    except Exception as error:
        raise Unavailable(
            f"{kind} {entry.name!r} of {entry.value}: {type(error).__name__}: {error}"
        ) from error
