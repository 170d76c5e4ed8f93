"""Records which files, modules and environment variables user code reads, with digests.

Python calls audit hooks for each `open`, imports included, reads of `os.environ` go through a
class of this module; functions of libraries that open files in native code are wrapped.
Only reads by user code count: code that is neither of the standard library, nor of an installed
package, nor of this toolkit. Of the packages that it imports the versions are recorded. An
installed package counts, too, if the pipeline file names a function of it.

Not recorded: reads by other C extensions and processes, the network, listings, looks for a file.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field

from compress.common.atomic_files import sha256_while_unchanged
from compress.common.code_origin import identify, is_below, is_installed, locate, name_of, origin_of
from compress.common.config import Settings
from compress.common.requirements import DISTRIBUTION

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

READERS = {
    "safetensors": ("safe_open",),
    "torch": ("from_file",),
    "torch.jit": ("load",),
    "torch.export": ("load",),
    "torchvision.io": ("decode_image", "read_file", "read_image", "read_video"),
    "pyarrow": ("input_stream", "memory_map"),
    "pyarrow.csv": ("open_csv", "read_csv"),
    "pyarrow.dataset": ("dataset",),
    "pyarrow.feather": ("read_feather", "read_table"),
    "pyarrow.parquet": (
        "ParquetDataset",
        "ParquetFile",
        "read_pandas",
        "read_schema",
        "read_table",
    ),
    "cv2": ("VideoCapture", "imread"),
    "h5py": ("File",),
    "lmdb": ("Environment", "open"),
}
"""Module → its functions and classes that take the path of a file, or of a folder of files."""
ALL_NAMES = "*"  # stands for the names of all environment variables, which code may list
UNTRACKED = frozenset(
    (
        *("ctypes.dlopen", "mmap.__new__", "sqlite3.connect"),
        *("glob.glob", "glob.glob/2", "os.fwalk", "os.listdir", "os.scandir", "os.walk"),
        *("os.exec", "os.fork", "os.posix_spawn", "os.system", "subprocess.Popen"),
        *("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"),
    )
)
"""Audit events of reads that no digest of a file or a variable stands for."""
_NO_DATA = ("/proc/", "/sys/", "/dev/")
"""The kernel and its devices make up the content of these files: they hold no data of the user."""
_thread = threading.local()
_set_here: dict[str, str | None] = {}
"""Variables that user code or this toolkit has set → their values before."""
_referenced: set[str] = set()
"""Folders and files of installed packages whose functions the pipeline file names."""
_imports: dict[str, set[str]] = {}
"""File of user code → files of the modules that it imported; a second import opens no file."""
_sources: dict[str, str | None] = {}
"""File of a module of user code → its digest when it was imported."""
_IMPORTERS = frozenset(
    ("<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>", importlib.__file__)
)
"""Files between an import and the code that asks for it."""
_IMPORTLIB = str(Path(importlib.__file__).parent)


def record_reads_of(target: Any) -> None:
    """Record from now on what an installed function's or class's package opens for itself."""
    name = getattr(target, "__module__", None) or ""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    package = name.partition(".")[0]
    if package in sys.stdlib_module_names or not file or origin_of(file) != "other":
        return
    start = getattr(sys.modules.get(package), "__file__", None) or file
    # Packages that this toolkit works with open files for it, too: of these, the one module.
    is_whole = start.endswith("__init__.py") and package not in _own_requirements()
    _referenced.add(start.removesuffix("__init__.py") if is_whole else file)


@cache
def _own_requirements() -> frozenset[str]:
    lines: Iterable[str] = ()
    with suppress(importlib.metadata.PackageNotFoundError):  # beside an archive's worker
        lines = importlib.metadata.requires(DISTRIBUTION) or ()
    return frozenset(re.split(r"[^\w-]", line)[0].lower().replace("-", "_") for line in lines)


class _AfterImport(MetaPathFinder):
    """Wraps the readers of a module once it has been imported."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        finders = [f for f in sys.meta_path if f is not self] if fullname in READERS else []
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec), None)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _wrap_readers(module, self.note)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap_readers(module: ModuleType, note: Callable[[str], None]) -> None:
    for name in READERS[module.__name__]:
        reader: Any = getattr(module, name, None)
        if reader is None:
            continue
        wrapped: Any = _noted(reader, note)
        if isinstance(reader, type) and isinstance(vars(reader).get("__init__"), FunctionType):
            reader.__init__ = _noted(reader.__init__, note)  # type: ignore[misc]
            continue  # subclasses are noted, too
        if isinstance(reader, type):
            wrapped = _Class(name, (), {"wrapped": staticmethod(wrapped), "reader": reader})
        for other in [*sys.modules.values()]:
            if getattr(other, "__dict__", {}).get(name) is reader:
                setattr(other, name, wrapped)


class _Class(type):
    """Stands for a class that C defines, which cannot be changed."""

    wrapped: Callable[..., Any]
    reader: type

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        return cls.wrapped(*arguments, **keywords)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.reader)


def _noted(reader: Callable[..., Any], note: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(reader)
    def noted(*arguments: Any, **keywords: Any) -> Any:
        for given in (*arguments, *keywords.values()):
            for path in given if isinstance(given, list | tuple) else (given,):
                if isinstance(path, str | os.PathLike) and Path(path).exists():
                    note(os.fsdecode(path))
        return reader(*arguments, **keywords)

    return noted


class Dependencies(Settings):
    """Files and variables that were read, with SHA-256 digests; None for missing ones."""

    files: dict[str, str | None] = {}
    """Relative to the pipeline's folder where they lie below it or beside the user's code."""
    environment: dict[str, str | None] = {}
    modules: Annotated[dict[str, str | None], Field(exclude_if=lambda modules: not modules)] = {}
    """Name in an import statement → the distribution and its version, or the user's file."""

    def change(self, folder: Path, code: Path | None = None) -> str:
        """Describe the first file, variable or module that has changed since; empty if none has.

        ``folder`` and ``code`` are those of :meth:`Recording.dependencies`.
        """
        files = {name: digest_of(folder / name) for name in self.files}
        environment = {name: digest_of_variable(name) for name in self.environment}
        modules = _located(self.modules, _roots(folder, code))
        now = Dependencies(files=files, environment=environment, modules=modules)
        return self.difference(now)

    def difference(self, now: Dependencies) -> str:
        """Describe the first file, variable or module that differs; empty if none does."""
        for name in sorted({*self.modules, *now.modules}):
            before, after = self.modules.get(name), now.modules.get(name)
            if before != after:
                return f"module {name}: {before or 'not installed'} → {after or 'not installed'}"
        for name in sorted({*self.files, *now.files}):
            before, after = self.files.get(name), now.files.get(name)
            if before != after:
                return f"file {name} {_how(before, after, 'is there now', 'is gone')}"
        names = {*self.environment, *now.environment}
        for name in sorted(names, key=lambda name: (name == ALL_NAMES, name)):
            before, after = self.environment.get(name), now.environment.get(name)
            if before != after and name == ALL_NAMES:
                return "environment variables are set or gone, and code lists them"
            if before != after:
                how = _how(before, after, "is set now", "is not set any more")
                return f"environment variable {name} {how}"
        return ""


@dataclass
class Recording:
    """What user code has read so far; it can be pickled."""

    files: set[str] = field(default_factory=set)
    """Absolute paths of files that were read, except those that the code itself had written."""
    written: set[str] = field(default_factory=set)
    """Absolute paths of files that were opened for writing."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Digest of each variable's value when it was first read."""
    modules: set[str] = field(default_factory=set)
    """Dotted names of the modules that the code imported, of installed packages or its own."""
    untracked: set[str] = field(default_factory=set)
    """Reads without a digest: listings, looks for a file, network; unknown to other processes."""

    def add(self, other: Recording) -> None:
        """Merge another recording into this one."""
        self.files |= other.files - self.written
        self.written |= other.written
        self.environment = {**other.environment, **self.environment}
        self.modules |= other.modules
        self.untracked |= other.untracked

    def to_json(self) -> str:
        """Serialize it for another process."""
        return json.dumps(
            [*map(sorted, (self.files, self.written, self.modules)), self.environment]
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Restore what :meth:`to_json` serialized."""
        *names, environment = json.loads(text)
        files, written, modules = map(set, names)
        return cls(files, written, environment, modules)

    def dependencies(
        self, folder: Path, code: Path | None = None, outputs: Sequence[Path] = ()
    ) -> Dependencies:
        """Hash what was read, but for files in ``outputs`` and variables set by the code itself.

        Files below ``folder`` or ``code``, that of the user's modules, are relative to ``folder``.
        """
        roots = _roots(folder, code)
        left_out = tuple(map(os.path.realpath, outputs))
        files: dict[str, str | None] = {}
        for path in sorted(self.files):
            is_special = os.path.exists(path) and not os.path.isfile(path)  # noqa: PTH110, PTH113
            if not is_special and not is_below(os.path.realpath(path), left_out):
                files[_relative(path, roots)] = digest_of(Path(path))
        # A rank or worker process has variables of its own, such as RANK.
        environment = {
            name: digest
            for name, digest in sorted(self.environment.items())
            if name not in _set_here and digest == digest_of_variable(name)
        }
        modules = _located(sorted(self.modules), roots)
        return Dependencies(files=files, environment=environment, modules=modules)


def _roots(folder: Path, code: Path | None) -> tuple[str, ...]:
    # The pipeline's folder as user code names it, without links, and that of modules.
    start = os.path.abspath(folder)  # noqa: PTH100 - links stay
    return start, os.path.realpath(folder), os.path.realpath(code or folder)


def _relative(path: str, roots: tuple[str, ...]) -> str:
    """Return a path as it is the same in another checkout of the pipeline and its code."""
    return os.path.relpath(path, roots[0]) if is_below(path, roots) else path


def _located(modules: Iterable[str], roots: tuple[str, ...]) -> dict[str, str | None]:
    """Return what each imported name stands for in a fresh process, by the package's name."""
    found = dict(filter(None, (locate(name, Path(roots[-1])) for name in modules)))
    return {
        name: identify(file)
        if file and is_installed(os.path.realpath(file))
        else file and _relative(file, roots)
        for name, file in found.items()
    }


_recordings: list[Recording] = []
"""Active recordings of all threads: user code may read in threads of its own."""


@contextmanager
def recording() -> Iterator[Recording]:
    """Record what user code reads during a block."""
    _install()
    found = Recording()
    _recordings.append(found)
    try:
        yield found
    finally:
        # By identity: `remove` would drop an equal recording of another thread.
        _recordings[:] = [r for r in _recordings if r is not found]
        # With what the modules among them import, recursively.
        queue, found.files = list(found.files), set()
        while queue:
            path = queue.pop()
            if path in found.files:
                continue
            if origin_of(path) == "other":
                found.modules.add(name_of(path))
                continue
            found.files.add(path)
            queue += _imports.get(path, ())
            if path.endswith(".py"):
                _sources.setdefault(path, digest_of(Path(path)))
                with suppress(OSError):
                    found.modules |= imported_names(Path(path).read_bytes())


@contextmanager
def recording_paused(*, environment: bool = False) -> Iterator[None]:
    """Do not record which files this thread reads in a block, nor variables with ``environment``.

    They decide nothing, or the caller accounts for them otherwise.
    """
    before = getattr(_thread, "paused", False), getattr(_thread, "environment_paused", False)
    _thread.paused, _thread.environment_paused = True, environment or before[1]
    try:
        yield
    finally:
        _thread.paused, _thread.environment_paused = before


def add_to_recordings(found: Recording) -> None:
    """Merge reads that were recorded elsewhere or before into all active recordings."""
    if getattr(_thread, "paused", False):
        return
    for active in _recordings:
        if active is not found:
            active.add(found)


def take_recorded() -> Recording:
    """Return and reset what this process has recorded so far; for worker processes."""
    found = Recording()
    for active in _recordings:
        found.add(active)
        active.files, active.written, active.environment = set(), set(), {}
    return found


def changed_sources() -> set[str]:
    """Return and forget the files of modules that have changed since they were imported."""
    # Missing files do not count: an artifact's code is imported before its folder is renamed.
    with recording_paused():
        now = {path: digest_of(Path(path)) for path in _sources}
    changed = {path for path, digest in now.items() if digest not in (None, _sources[path])}
    for path in changed:
        del _sources[path]
    return changed


def digest_of_variable(name: str) -> str | None:
    """Return the SHA-256 of an environment variable's value from before user code set it.

    Of :data:`ALL_NAMES` it is that of the names.
    """
    if name == ALL_NAMES:
        names = {*os._Environ.__iter__(os.environ), *_set_here}
        value: str | None = "\n".join(sorted(n for n in names if _value_of(n) is not None))
    else:
        value = _value_of(name)
    return None if value is None else hashlib.sha256(os.fsencode(value)).hexdigest()


def digest_of(path: Path) -> str | None:
    """Return the SHA-256 of a regular file; None if it cannot be read."""
    try:
        # Opening a pipe would block.
        return sha256_while_unchanged(path) if stat.S_ISREG(path.stat().st_mode) else None
    except OSError:
        return None


@lru_cache(maxsize=1024)
def imported_names(source: bytes, package: str = "") -> frozenset[str]:
    """Return the dotted names in a source's import statements, relative ones within a package."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return frozenset()  # the import itself reports the error with its line
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            parents = package.split(".")
            prefix = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*filter(None, prefix), *([node.module] if node.module else [])])
            names |= {base} if base else set()
            names |= {f"{base}.{alias.name}" if base else alias.name for alias in node.names}
    return frozenset(names)


@cache
def _install() -> None:
    """Install what notes reads: Python cannot remove an audit hook again."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if not _recordings or getattr(_thread, "paused", False):
            return
        if event != "open" and event not in UNTRACKED:
            return
        # Arguments that `open` will reject; and what is opened to classify a file is not noted.
        with suppress(ValueError, TypeError, OSError), recording_paused():
            if event == "open":
                _note_open(*arguments)
            else:
                _note_untracked(event, *arguments[:1])

    def note(path: str) -> None:
        if _recordings and not getattr(_thread, "paused", False):
            within = sorted(file for file in Path(path).rglob("*") if file.is_file())
            with recording_paused():
                for file in within or [Path(path)]:
                    _note_open(file, None, os.O_RDONLY)

    sys.addaudithook(audit)
    for name in READERS.keys() & sys.modules:
        _wrap_readers(sys.modules[name], note)
    sys.meta_path.insert(0, _AfterImport(note))
    for name in ("access", "lstat", "stat"):  # Python has no audit event for these
        setattr(os, name, _noting_look(name))
    # Not other objects: those who imported `environ` before would keep the old one.
    os.environ.__class__ = os.environb.__class__ = _Environment


def _noting_look(name: str) -> Callable[..., Any]:
    look: Callable[..., Any] = getattr(os, name)

    @functools.wraps(look)
    def noting(path: Any, *arguments: Any, **keywords: Any) -> Any:
        if _recordings and not getattr(_thread, "paused", False):
            with suppress(ValueError, TypeError, OSError), recording_paused():
                _note_untracked(f"os.{name}", path)
        return look(path, *arguments, **keywords)

    for kind in (os.supports_dir_fd, os.supports_follow_symlinks, os.supports_fd):
        if look in kind:
            kind.add(noting)
    return noting


def _note_untracked(event: str, path: Any = None) -> None:
    """Add a read without a digest that user code asks for, itself or by a library."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and origin_of(frame.f_code.co_filename) == "other":
        # A package that is being imported, or looks which others are installed: versions count.
        if frame.f_code.co_filename.startswith(("<frozen importlib", _IMPORTLIB)):
            return
        frame = frame.f_back
    caller = frame.f_code.co_filename if frame else ""
    if origin_of(caller) != "user":
        return
    if isinstance(path, str | bytes | os.PathLike):
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - links stay
        # Code looks where it lies itself, as `Path(__file__).resolve()` does.
        is_own_place = event in ("os.lstat", "os.stat") and is_below(caller, (name,))
        if name.startswith(_NO_DATA) or is_installed(name) or is_own_place:
            return
    for active in _recordings:
        active.untracked.add(event)


def _note_open(path: Any, mode: Any, flags: int) -> None:
    """Add a file that user code opens to the active recordings."""
    if isinstance(path, int):
        return
    # The innermost user file before one of this toolkit: libraries open files for their callers.
    frame: FrameType | None = sys._getframe(2)
    is_referenced = False
    while frame is not None and origin_of(frame.f_code.co_filename) == "other":
        is_referenced |= frame.f_code.co_filename.startswith((*_referenced,))
        frame = frame.f_back
    if not is_referenced and (frame is None or origin_of(frame.f_code.co_filename) != "user"):
        return
    caller = frame.f_code.co_filename if frame else ""
    name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - links stay, as the code names them
    if name.endswith(".pyc"):
        name = importlib.util.source_from_cache(name)
    if name.startswith(_NO_DATA):
        return
    # Of the modules of packages, those count that user code imports itself.
    if origin_of(name) != "user" and not (
        origin_of(name) == "other"
        and name.endswith(".py")
        and _direct_origin(sys._getframe(2), _IMPORTERS) == "user"
    ):
        return
    is_written = flags & (os.O_WRONLY | os.O_RDWR)
    is_read = not flags & (os.O_WRONLY | os.O_TRUNC)
    if name.endswith(".py") and not is_written:
        _imports.setdefault(caller, set()).add(name)
    for active in _recordings:
        if is_read and name not in active.written:
            active.files.add(name)
        if is_written:
            active.written.add(name)


def _direct_origin(frame: FrameType | None, skipped: frozenset[str]) -> str:
    """Classify the direct caller only, because libraries read much for themselves."""
    while frame is not None and frame.f_code.co_filename in skipped:
        frame = frame.f_back
    return origin_of(frame.f_code.co_filename) if frame is not None else "other"


def _note_variable(key: Any, frame: FrameType) -> None:
    """Add a variable that user code reads, or their names, to the recordings."""
    is_recorded = _recordings and not getattr(_thread, "environment_paused", False)
    is_name = isinstance(key, str | bytes)
    if is_recorded and is_name and _direct_origin(frame, _MAPPINGS) == "user":
        name = os.fsdecode(key)
        for active in _recordings:
            active.environment.setdefault(name, digest_of_variable(name))


class _Environment(os._Environ[Any]):
    """The class of `os.environ` and `os.environb`: it notes which variables user code reads."""

    def __getitem__(self, key: Any) -> Any:
        _note_variable(key, sys._getframe(1))
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        _note_variable(ALL_NAMES, sys._getframe(1))
        return super().__iter__()

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note_change(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._note_change(key)
        super().__delitem__(key)

    def copy(self) -> dict[Any, Any]:
        """Return a copy that notes what is read of it: most are only passed to subprocesses."""
        get = super().__getitem__
        return _EnvironmentCopy({key: get(key) for key in super().__iter__()})

    def _note_change(self, key: Any) -> None:
        origin = _direct_origin(sys._getframe(2), _MAPPINGS)
        if origin == "own" or (origin == "user" and _recordings):
            _set_here.setdefault(os.fsdecode(key), _value_of(os.fsdecode(key)))


class _EnvironmentCopy(dict[Any, Any]):
    """A copy of all variables, of which user code may read some."""

    def __getitem__(self, key: Any) -> Any:
        _note_variable(key, sys._getframe(1))
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[Any]:
        _note_variable(ALL_NAMES, sys._getframe(1))
        return super().__iter__()

    __contains__ = Mapping.__contains__
    get = Mapping.get  # type: ignore[assignment]
    keys, values, items = Mapping.keys, Mapping.values, Mapping.items  # type: ignore[assignment]

    def pop(self, key: Any, *default: Any) -> Any:
        _note_variable(key, sys._getframe(1))
        return super().pop(key, *default)


_MAPPINGS = frozenset(
    code.co_filename
    for code in (
        *(os.getenv.__code__, os.path.expandvars.__code__),
        *(Mapping.get.__code__, _note_variable.__code__),
    )
)
"""Files whose functions stand between a read of a variable and their caller."""


def _value_of(name: str) -> str | None:
    """Return a variable's value from before user code or this toolkit set it."""
    if name in _set_here:
        return _set_here[name]
    try:
        return os._Environ.__getitem__(os.environ, name)
    except KeyError:
        return None


def _how(before: str | None, now: str | None, appeared: str, gone: str) -> str:
    return appeared if before is None else gone if now is None else "changed"
