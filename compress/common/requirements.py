"""Requirement: a library or a program that a stage cannot do without."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING

from compress.common.config import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator


class Requirement(Settings):
    """Something that a stage cannot do without."""

    what: str
    """A Python module, or a program on the PATH."""
    install: str
    """What to do when it is missing."""
    program: bool = False
    """Whether it is a program: a missing one stops its own stage, and what came before is kept."""

    def missing(self) -> bool:
        """Whether it is not here."""
        if self.program:
            return shutil.which(self.what) is None
        return importlib.util.find_spec(self.what.partition(".")[0]) is None


COMPILER = Requirement(
    what=(os.environ.get("CXX") or "g++").split()[0],
    program=True,
    install="a C++ compiler, e.g. apt-get install g++",
)
"""What Inductor compiles with."""


def requirements_of(settings: Settings) -> Iterator[Requirement]:
    """Yield what settings, or settings within them, cannot do without."""
    yield from getattr(settings, "requirements", ())
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Settings):
            yield from requirements_of(value)


def undisturbed(settings: Settings) -> bool:
    """Return whether settings, or settings within them, ask that nothing runs beside them.

    They say so by an attribute of this name: what they do measures time, or other nodes take part.
    """
    values = (getattr(settings, name) for name in type(settings).model_fields)
    nested = (value for value in values if isinstance(value, Settings))
    return bool(getattr(settings, "undisturbed", False)) or any(map(undisturbed, nested))
