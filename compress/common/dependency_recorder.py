"""Records which files, modules and environment variables user code reads, with digests.

Python calls audit hooks for each `open`, imports included, and reads of `os.environ` go through a
class of this module. Only reads by user code count: code that is neither of the standard library,
nor of an installed package, nor of this toolkit.

Not recorded: reads by C extensions and other processes, the network, listings of folders and checks
whether a file exists.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import stat
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from compress.common.atomic_files import sha256_of
from compress.common.config import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

OWN_PACKAGES = ("cli", "compress", "export", "serve", "pipelines")
"""Modules of this toolkit, never user code, even if user code lies in the same folder."""
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED = (
    _STANDARD,
    _STANDARD.with_name("python{}{}.zip".format(*sys.version_info)),  # first on sys.path
    *(Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib")),
)
"""Folders of the standard library and of installed packages, which their versions identify."""
_ROOT = Path(__file__).resolve().parents[2]
_OWN = tuple(str(_ROOT / name) for name in OWN_PACKAGES)
_LOADERS = (str(_ROOT / "compress" / "common" / "factories.py"), str(Path(__file__).resolve()))
"""Files of this toolkit between the user's code and a module that it imports, on the stack."""
_NO_DATA = ("/proc/", "/sys/", "/dev/")
"""The kernel and its devices make up the content of these files: they hold no data of the user."""
_RACY_SECONDS = 2.0
"""A file changed this recently may change again without a new mtime; its digest is not cached."""


class Dependencies(Settings):
    """Files and variables that were read, with SHA-256 digests; None for missing ones."""

    files: dict[str, str | None] = {}
    """Relative to the pipeline's folder where they lie below it or beside the user's code."""
    environment: dict[str, str | None] = {}

    def change(self, folder: Path) -> str:
        """Describe the first file or variable that has changed since; empty if none has."""
        files = {name: digest_of(folder / name) for name in self.files}
        environment = {name: digest_of_variable(name) for name in self.environment}
        return self.difference(Dependencies(files=files, environment=environment))

    def difference(self, now: Dependencies) -> str:
        """Describe the first file or variable that differs from ``now``; empty if none does."""
        for name in sorted({*self.files, *now.files}):
            before, after = self.files.get(name), now.files.get(name)
            if before != after:
                return f"file {name} {_how(before, after, 'is there now', 'is gone')}"
        for name in sorted({*self.environment, *now.environment}):
            before, after = self.environment.get(name), now.environment.get(name)
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

    def add(self, other: Recording) -> None:
        """Merge another recording into this one."""
        self.files |= other.files - self.written
        self.written |= other.written
        self.environment = {**other.environment, **self.environment}

    def to_json(self) -> str:
        """Serialize it for another process."""
        files, written = sorted(self.files), sorted(self.written)
        return json.dumps([files, written, self.environment])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Restore what :meth:`to_json` serialized."""
        files, written, environment = json.loads(text)
        return cls(set(files), set(written), environment)

    def dependencies(
        self, folder: Path, code: Path | None = None, outputs: Sequence[Path] = ()
    ) -> Dependencies:
        """Hash what was read, but for files in ``outputs`` and variables set by the code itself.

        Files below ``folder`` or ``code``, that of the user's modules, are relative to ``folder``.
        """
        start = os.path.abspath(folder)  # noqa: PTH100 - links stay, as user code names files
        roots = start, os.path.realpath(folder), os.path.realpath(code or folder)
        left_out = tuple(map(os.path.realpath, outputs))
        files: dict[str, str | None] = {}
        for path in sorted(self.files):
            is_special = os.path.exists(path) and not os.path.isfile(path)  # noqa: PTH110, PTH113
            if not is_special and not _is_below(os.path.realpath(path), left_out):
                # Relative names are the same in another checkout of the pipeline and its code.
                name = os.path.relpath(path, start) if _is_below(path, roots) else path
                files[name] = digest_of(Path(path))
        # A rank or worker process has variables of its own, such as RANK.
        environment = {
            name: digest
            for name, digest in sorted(self.environment.items())
            if name not in _set_here and digest == digest_of_variable(name)
        }
        return Dependencies(files=files, environment=environment)


_recordings: list[Recording] = []
"""Active recordings of all threads: user code may read in threads of its own."""
_thread = threading.local()
_set_here: dict[str, str | None] = {}
"""Variables that user code or this toolkit has set → their values before."""
_imports: dict[str, set[str]] = {}
"""File of user code → files of the modules that it imported; a second import opens no file."""
_sources: dict[str, str | None] = {}
"""File of a module of user code → its digest when it was imported."""
_digests: dict[Path, tuple[tuple[int, ...], str]] = {}
"""File → its stat, and its digest: a cache."""


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
            if path not in found.files:
                found.files.add(path)
                queue += _imports.get(path, ())
                if path.endswith(".py"):
                    _sources.setdefault(path, digest_of(Path(path)))


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
    now = {path: digest_of(Path(path)) for path in _sources}
    changed = {path for path, digest in now.items() if digest not in (None, _sources[path])}
    for path in changed:
        del _sources[path]
    return changed


def digest_of_variable(name: str) -> str | None:
    """Return the SHA-256 of an environment variable's value from before user code set it."""
    return _digest(_set_here[name] if name in _set_here else os.environ.get(name))


def digest_of(path: Path) -> str | None:
    """Return the SHA-256 of a regular file; None if it cannot be read."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would block
            return None
        identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        known = _digests.get(path)
        if known and known[0] == identity:
            return known[1]
        digest = sha256_of(path)
    except OSError:
        return None
    if time.time() - found.st_ctime > _RACY_SECONDS:
        _digests[path] = identity, digest
    return digest


@lru_cache(maxsize=65_536)
def origin_of(filename: str) -> Literal["user", "own", "other"]:
    """Classify a source file: user code, this toolkit's own, or another library's."""
    if filename.startswith("<"):  # generated code, such as the methods of dataclasses
        return "other"
    path = os.path.realpath(filename)
    if path in _LOADERS or _is_below(path, tuple(map(str, INSTALLED))):
        return "other"
    return "own" if _is_below(path.removesuffix(".py"), _OWN) else "user"


@cache
def _install() -> None:
    """Install the audit hook, which Python cannot remove again, and observe `os.environ`."""

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and _recordings and not getattr(_thread, "paused", False):
            with suppress(ValueError, TypeError, OSError):  # arguments that `open` will reject
                _note_open(*arguments)

    sys.addaudithook(audit)
    # Not another object: those who imported `environ` before would keep the old one.
    os.environ.__class__ = _Environment


def _note_open(path: Any, mode: Any, flags: int) -> None:
    """Add a file that user code opens to the active recordings."""
    if isinstance(path, int):
        return
    # The innermost user file on the stack before a frame of this toolkit: libraries open files for
    # whoever calls them.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and origin_of(frame.f_code.co_filename) == "other":
        frame = frame.f_back
    if frame is None or origin_of(frame.f_code.co_filename) != "user":
        return
    caller = frame.f_code.co_filename
    name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - links stay, as the code names them
    if name.endswith(".pyc"):
        name = importlib.util.source_from_cache(name)
    if origin_of(name) != "user" or name.startswith(_NO_DATA):
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


def _direct_origin(frame: FrameType | None) -> str:
    """Classify the direct caller only, because libraries read many variables for themselves."""
    while frame is not None and frame.f_code.co_filename in _MAPPINGS:
        frame = frame.f_back
    return origin_of(frame.f_code.co_filename) if frame is not None else "other"


class _Environment(os._Environ[str]):
    """The class of `os.environ`: it adds each variable that user code reads to the recordings."""

    def __getitem__(self, key: str) -> str:
        is_recorded = _recordings and not getattr(_thread, "environment_paused", False)
        if is_recorded and isinstance(key, str) and _direct_origin(sys._getframe(1)) == "user":
            value = self._plain(key)
            for active in _recordings:
                active.environment.setdefault(key, _digest(value))
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: str) -> None:
        self._note_change(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._note_change(key)
        super().__delitem__(key)

    def copy(self) -> dict[str, str]:
        """Return all variables without recording them: copies are passed on to subprocesses."""
        return {key: super(_Environment, self).__getitem__(key) for key in self}

    def _note_change(self, key: str) -> None:
        origin = _direct_origin(sys._getframe(2))
        if origin == "own" or (origin == "user" and _recordings):
            _set_here.setdefault(key, self._plain(key))

    def _plain(self, key: str) -> str | None:
        try:
            return super().__getitem__(key)
        except KeyError:
            return None


_MAPPINGS = frozenset(
    code.co_filename
    for code in (
        os.getenv.__code__,
        os._Environ.__getitem__.__code__,
        os.environ.get.__func__.__code__,  # type: ignore[attr-defined]
        _Environment.__getitem__.__code__,
    )
)
"""Files whose functions stand between `os.environ[…]` or `os.getenv(…)` and their caller."""


def _digest(value: str | None) -> str | None:
    return None if value is None else hashlib.sha256(os.fsencode(value)).hexdigest()


def _how(before: str | None, now: str | None, appeared: str, gone: str) -> str:
    return appeared if before is None else gone if now is None else "changed"


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)
