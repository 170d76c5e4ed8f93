"""Imports the user's ``module:callable``, and finds the source files that it needs."""

# The files are found by parsing import statements, so that they can be hashed into cache keys and
# copied into artifacts, which then load on other machines. Other imports and reads are recorded
# while the code runs: see dependency_recorder.

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from itertools import accumulate
from pathlib import Path
from types import CodeType
from typing import Annotated, Any

from pydantic import Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from compress.common.code_origin import OWN_PACKAGE, find_below, is_installed, origin_of
from compress.common.dependency_recorder import (
    Dependencies,
    Recording,
    add_to_recordings,
    changed_sources,
    imported_names,
    record_reads_of,
    recording,
)
from compress.common.errors import PipelineInvalid
from compress.common.process import gc_disabled

REFERENCE = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
Reference = Annotated[str, Field(pattern=REFERENCE.pattern)]
"""``module:callable``; looked up in the pipeline's folder first, then as installed."""


@dataclass(frozen=True)
class NameOrReference:
    """Annotation of a setting that is a built-in name, or the user's ``module:callable``."""

    kind: str
    """What it names, for messages: `loss`."""
    names: Callable[[], tuple[str, ...]]
    """Returns the built-in names, which installed packages may add to."""

    def check(self, name: str) -> str:
        """Return the name; ValueError says which are known, and the nearest one."""
        names = self.names()
        if name in names or REFERENCE.match(name):
            return name
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        expected = f"{', '.join(names)} or module:callable"
        raise ValueError(f"unknown {self.kind} {name!r}; {hint}expected {expected}")

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        own = {"type": "string", "pattern": REFERENCE.pattern}
        return {"anyOf": [{"enum": list(self.names())}, own]}


class _ImportsItself(PipelineInvalid):
    """A script without a guard is imported by what it runs itself."""


class _Importing(threading.local):
    def __init__(self) -> None:
        self.names: list[str] = []
        """The modules that this thread is importing for references, the innermost last."""


_importing = _Importing()


def refuse_in_import() -> None:
    """Raise PipelineInvalid if a factory's module is being imported: it should only define it."""
    if _importing.names:
        resolve(f"{_importing.names[-1]}:factory")


def resolve(reference: str, folder: Path | None = None) -> Callable[..., Any]:
    """Import ``module:callable``, first from the user's folder, or raise PipelineInvalid."""
    module_name, _, attribute = reference.partition(":")
    if module_name in _importing.names:
        raise _ImportsItself(
            f"{reference!r}: importing {module_name!r} runs what imports it again; put what a "
            f'script does under `if __name__ == "__main__":`, so that importing it only defines '
            f"{attribute!r}"
        )
    _importing.names.append(module_name)
    try:
        with nullcontext() if folder else _as_installed(module_name):
            module = _import(module_name, folder, local_sources(reference, folder))
    except _ImportsItself:
        raise
    except (Exception, SystemExit) as error:
        missing = ", which is no folder" if folder and not folder.is_dir() else ""
        where = f" (looked in {folder}{missing}, then among installed packages)" if folder else ""
        raise PipelineInvalid(
            f"cannot import {module_name!r} for {reference!r}{where}: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        _importing.names.pop()
    target: Any = module
    for part in attribute.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        names = [n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_")]
        raise PipelineInvalid(
            f"{reference!r}: module {module_name!r} ({getattr(module, '__file__', '?')}) has no "
            f"callable {attribute!r}; it has {', '.join(sorted(names)[:12]) or 'none'}"
        )
    record_reads_of(target)
    return target  # type: ignore[no-any-return]


def local_sources(reference: str, folder: Path | None = None) -> dict[str, Path]:
    """Return the user's source files that a reference needs, by path relative to their root."""
    # Installed packages and the standard library are left out; their versions identify them.
    module_name = reference.partition(":")[0]
    if folder and find_below(module_name, folder):
        root = folder
    else:
        try:
            spec = importlib.util.find_spec(module_name.split(".")[0])
        except (ImportError, ValueError):
            return {}
        path = Path(spec.origin).absolute() if spec and spec.origin else Path()
        if path.suffix != ".py" or is_installed(str(path.resolve())):
            return {}
        root = path.parent.parent if path.name == "__init__.py" else path.parent
    found: dict[str, Path] = {}
    queue = [module_name]
    while queue:
        name = queue.pop()
        for part in _with_parents(name):
            file = None if part.partition(".")[0] == OWN_PACKAGE else find_below(part, root)
            if file is None:
                continue
            key = file.relative_to(root.absolute()).as_posix()
            if key not in found:
                found[key] = file
                queue += _names_imported_by(part, file)
    return dict(sorted(found.items()))


def imported_libraries(reference: str) -> tuple[str, ...]:
    """Return the installed modules that a reference's module has imported into this process.

    Those that only libraries import are left out: they come with them.
    """
    libraries: dict[str, None] = {}
    seen, queue = set[str](), [reference.partition(":")[0]]
    while queue:
        name = queue.pop()
        parent, _, attribute = name.rpartition(".")
        if name not in sys.modules:  # a class or a function, or not imported so far
            found = vars(sys.modules[parent]).get(attribute) if parent in sys.modules else None
            name = getattr(found, "__module__", None) or parent
        if name in seen or name not in sys.modules:
            continue
        seen.add(name)
        file = getattr(sys.modules[name], "__file__", None) or ""
        if is_library(name):
            libraries[name] = None
        elif file.endswith(".py") and origin_of(file) == "user":
            queue += _names_imported_by(name, Path(file))
    return tuple(libraries)


def is_library(name: str) -> bool:
    """Whether an imported module is installed or part of this toolkit."""
    if name.partition(".")[0] == OWN_PACKAGE:
        return True
    spec = getattr(sys.modules.get(name), "__spec__", None)
    origin = Path(getattr(spec, "origin", None) or "built-in")
    return origin.is_absolute() and is_installed(str(origin.resolve()))


def sources_digest(sources: dict[str, Path]) -> str:
    """Return the SHA-256 of a set of source files, names and contents."""
    digest = hashlib.sha256()
    for name, path in sources.items():
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class _FromSource(SourceFileLoader):
    """Compiles the source at each import: cached bytecode may be outdated or forged."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _UserModules(MetaPathFinder):
    """Finds modules in the folder of the reference that was resolved last."""

    # It stays on ``sys.meta_path`` after the import: a factory may import more when it is called.
    folder: Path | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if self.folder is None or fullname.partition(".")[0] == OWN_PACKAGE:
            return None
        if path is not None and not any(Path(p).is_relative_to(self.folder) for p in path):
            return None
        file = find_below(fullname, self.folder)
        if file is not None:
            places = [str(file.parent)] if file.name == "__init__.py" else None
            loader = _FromSource(fullname, str(file))
            return importlib.util.spec_from_file_location(
                fullname, file, loader=loader, submodule_search_locations=places
            )
        namespace = self.folder.joinpath(*fullname.split("."))
        if not namespace.is_dir() or not any(namespace.rglob("*.py")):
            return None
        spec = ModuleSpec(fullname, None, is_package=True)
        spec.submodule_search_locations = [str(namespace)]
        return spec


_finder = _UserModules()
_loaded: dict[str, str] = {}  # user's module → digest of the sources that it was last imported from

_ANYWHERE = Path(os.sep)  # base of relative paths: the current folder may change or be removed
_imports: dict[str, tuple[Recording, Dependencies]] = {}
"""Module name → what was read when it was imported."""


def _import(module_name: str, folder: Path | None, sources: dict[str, Path]) -> Any:
    digest = sources_digest(sources)
    if folder is not None and sources:
        _finder.folder = folder.absolute()
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    for name in _modules_of(changed_sources()):
        sys.modules.pop(name, None)  # so that a later import statement reads the new source
    loaded = sys.modules.get(module_name)
    before, read = _imports.get(module_name, (None, Dependencies()))
    if loaded is not None and _loaded.get(module_name, "" if folder else digest) == digest:
        # Missing modules do not count, as artifacts are moved.
        there = {f: d for f, d in read.files.items() if not f.endswith(".py") or Path(f).exists()}
        if not read.model_copy(update={"files": there}).change(_ANYWHERE):
            add_to_recordings(before or _read_by_import(module_name, Recording()))
            return loaded
    # Remove modules of the same names from another folder (each artifact has its own copy), or from
    # before an edit; objects that were made from them stay valid.
    for key in sources:
        parts = key.removesuffix(".py").removesuffix("/__init__").split("/")
        for name in _with_parents(".".join(parts)):
            sys.modules.pop(name, None)
    for name in _modules_of(before.files) if before else ():
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    with gc_disabled(), recording() as recorded:
        module = importlib.import_module(module_name)
    found = _read_by_import(module_name, recorded)
    _loaded[module_name] = digest
    # What is imported is as new as this process.
    _imports[module_name] = found, replace(found, modules=set()).dependencies(_ANYWHERE)
    add_to_recordings(found)
    return module


def _read_by_import(module_name: str, recorded: Recording) -> Recording:
    """Add to a module's recording the modules that were already imported when it needed them."""
    found, queue = Recording(modules={module_name}), [module_name]
    found.add(recorded)
    seen: set[str] = set()
    while queue:
        name = queue.pop()
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if name in seen or not file or not file.endswith(".py") or origin_of(file) != "user":
            continue
        seen.add(name)
        found.files.add(os.path.abspath(file))  # noqa: PTH100 - as it is named elsewhere
        with suppress(OSError):
            queue += _names_imported_by(name, Path(file))
    return found


def _modules_of(files: Set[str]) -> list[str]:
    """Return the names of the modules that were imported from the given files."""
    # Thousands of modules may be imported, and this is asked each time that a model is built.
    modules = list(sys.modules.items()) if files else []
    return [n for n, m in modules if n != "__main__" and getattr(m, "__file__", None) in files]


@contextmanager
def forget_modules(files: Set[str]) -> Iterator[None]:
    """Import the modules of some files anew within a block, and take the former ones after it."""
    former = {name: sys.modules.pop(name) for name in _modules_of(files)}
    try:
        yield
    finally:
        sys.modules.update(former)


@contextmanager
def _as_installed(module_name: str) -> Iterator[None]:
    # Without the user's folder, whose modules may have names of installed ones.
    top = module_name.partition(".")[0]
    spec = getattr(sys.modules.get(top), "__spec__", None)
    if isinstance(getattr(spec, "loader", None), _FromSource):
        for name in [n for n in sys.modules if n == top or n.startswith(f"{top}.")]:
            del sys.modules[name]
    last, _finder.folder = _finder.folder, None
    try:
        yield
    finally:
        _finder.folder = last


def _names_imported_by(module_name: str, file: Path) -> frozenset[str]:
    is_package = file.name == "__init__.py"
    package = module_name if is_package else module_name.rpartition(".")[0]
    return imported_names(file.read_bytes(), package)


def _with_parents(name: str) -> list[str]:
    return [*accumulate(name.split("."), "{}.{}".format)]
