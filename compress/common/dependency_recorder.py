"""What user code reads while it runs: files, modules and environment variables, with digests.

Python announces each `open` to audit hooks, imports included, and reads of `os.environ` go through
a class of this module. Only what the user's own code asks for counts: its code is whatever is
neither of the standard library, nor of an installed package, nor of this toolkit.

Not seen: what C extensions and other processes read by themselves, the network, listings of folders
and checks whether a file exists.
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
"""Never the user's, even where the user's code lies beside them."""
_STANDARD = Path(sysconfig.get_path("stdlib")).resolve()
INSTALLED = (
    _STANDARD,
    _STANDARD.with_name("python{}{}.zip".format(*sys.version_info)),  # where imports look first
    *(Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib")),
)
"""Places of the standard library and of installed packages: their versions identify them."""
_ROOT = Path(__file__).resolve().parents[2]
_OWN = tuple(str(_ROOT / name) for name in OWN_PACKAGES)
_LOADERS = (str(_ROOT / "compress" / "common" / "factories.py"), str(Path(__file__).resolve()))
"""Frames between the user's code and a file that it imports."""
_NO_DATA = ("/proc/", "/sys/", "/dev/")
_RACY_SECONDS = 2.0
"""A file that changed so shortly before it was hashed may change again within a clock tick."""


class Dependencies(Settings):
    """What was read, with SHA-256 digests; None for a file or variable that was not there."""

    files: dict[str, str | None] = {}
    """Relative to the pipeline's folder where they lie below it or beside the user's code."""
    environment: dict[str, str | None] = {}

    def change(self, folder: Path) -> str:
        """Return the first thing that is not as it was, in words; empty where all is.

        Args:
            folder: the pipeline's folder.
        """
        files = {name: digest_of(folder / name) for name in self.files}
        environment = {name: digest_of_variable(name) for name in self.environment}
        return self.difference(Dependencies(files=files, environment=environment))

    def difference(self, now: Dependencies) -> str:
        """Return the first thing that differs from what it is now, in words; empty where all is."""
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
    """What user code has asked for so far; it can be pickled."""

    files: set[str] = field(default_factory=set)
    """Absolute paths of files that were read, other than what the code itself had written."""
    written: set[str] = field(default_factory=set)
    """Absolute paths of files that were opened for writing."""
    environment: dict[str, str | None] = field(default_factory=dict)
    """Digest of each variable's value when it was first asked for."""

    def add(self, other: Recording) -> None:
        """Take in what another one holds."""
        self.files |= other.files - self.written
        self.written |= other.written
        self.environment = {**other.environment, **self.environment}

    def to_json(self) -> str:
        """Return it for another process."""
        files, written = sorted(self.files), sorted(self.written)
        return json.dumps([files, written, self.environment])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what :meth:`to_json` gave."""
        files, written, environment = json.loads(text)
        return cls(set(files), set(written), environment)

    def dependencies(
        self, folder: Path, code: Path | None = None, outputs: Sequence[Path] = ()
    ) -> Dependencies:
        """Return what was read as digests.

        Variables are left out that the code itself set, or that the toolkit did for this process.

        Args:
            folder: the pipeline's; files below it, or below that of the code, are named relative
                to it, so that they have the same names in another checkout.
            code: the folder of the user's modules.
            outputs: folders that the toolkit writes.
        """
        start = os.path.abspath(folder)  # noqa: PTH100 - links stay, as user code names files
        roots = start, os.path.realpath(folder), os.path.realpath(code or folder)
        left_out = tuple(map(os.path.realpath, outputs))
        files: dict[str, str | None] = {}
        for path in sorted(self.files):
            if not _is_below(os.path.realpath(path), left_out) and not _is_special(path):
                name = os.path.relpath(path, start) if _is_below(path, roots) else path
                files[name] = digest_of(Path(path))
        # A rank, or a worker, has others than this process, such as RANK.
        environment = {
            name: digest
            for name, digest in sorted(self.environment.items())
            if name not in _set_here and digest == digest_of_variable(name)
        }
        return Dependencies(files=files, environment=environment)


_recordings: list[Recording] = []
"""Those under way, in any thread: user code may read in threads of its own."""
_thread = threading.local()
_set_here: dict[str, str | None] = {}
"""Variables that user code itself, or this toolkit, has set → what they were before."""
_imports: dict[str, set[str]] = {}
"""File of user code → the modules' files that it has imported; a second import opens none."""
_sources: dict[str, str | None] = {}
"""User code's modules → their digest when they were imported."""
_digests: dict[Path, tuple[tuple[int, ...], str]] = {}
"""File → its identity on disk, and its digest."""


@contextmanager
def recording() -> Iterator[Recording]:
    """Record what user code reads during a block."""
    _install()
    found = Recording()
    _recordings.append(found)
    try:
        yield found
    finally:
        # Not `remove`, which compares by value.
        _recordings[:] = [r for r in _recordings if r is not found]
        found.files = _with_imports(found.files)
        for path in found.files:
            if path.endswith(".py"):
                _sources.setdefault(path, digest_of(Path(path)))


@contextmanager
def recording_paused() -> Iterator[None]:
    """Leave out what this thread reads during a block, for which something else accounts."""
    before = getattr(_thread, "paused", False)
    _thread.paused = True
    try:
        yield
    finally:
        _thread.paused = before


def add_to_recordings(found: Recording) -> None:
    """Let all recordings under way take in what was recorded elsewhere or before."""
    for active in _recordings:
        if active is not found:
            active.add(found)


def take_recorded() -> Recording:
    """Return what this process has recorded so far, and forget it; for worker processes."""
    found = Recording()
    for active in _recordings:
        found.add(active)
        active.files, active.written, active.environment = set(), set(), {}
    return found


def changed_sources() -> set[str]:
    """Return modules' files that have changed since they were imported, once.

    Those that are gone are not among them: an artifact's code is imported before it is renamed.
    """
    now = {path: digest_of(Path(path)) for path in _sources}
    changed = {path for path, digest in now.items() if digest not in (None, _sources[path])}
    for path in changed:
        del _sources[path]
    return changed


def digest_of_variable(name: str) -> str | None:
    """Return the SHA-256 of an environment variable as it was before user code set it."""
    return _digest(_set_here[name] if name in _set_here else os.environ.get(name))


def digest_of(path: Path) -> str | None:
    """Return the SHA-256 of a file; None where there is none that could be read."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would wait for ever
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
    """Return whose a source file is: the user's, this toolkit's, or another library's."""
    if filename.startswith("<"):  # code of no file, such as what dataclasses make
        return "other"
    path = os.path.realpath(filename)
    if path in _LOADERS or _is_below(path, tuple(map(str, INSTALLED))):
        return "other"
    return "own" if _is_below(path.removesuffix(".py"), _OWN) else "user"


@cache
def _install() -> None:
    """Add the audit hook, which stays as long as the process lives, and watch the environment."""
    sys.addaudithook(_audit)
    os.environ.__class__ = _Environment


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _recordings and not getattr(_thread, "paused", False):
        with suppress(ValueError, TypeError, OSError):  # what `open` itself will refuse
            _note_open(*arguments)


def _note_open(path: Any, mode: Any, flags: int) -> None:
    asker = "" if isinstance(path, int) else _asking_user_code(sys._getframe(2))
    if not asker:
        return
    name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - links stay, as the code names them
    if name.endswith(".pyc"):
        name = importlib.util.source_from_cache(name)
    if origin_of(name) != "user" or name.startswith(_NO_DATA):
        return
    is_written = flags & (os.O_WRONLY | os.O_RDWR)
    is_read = not flags & (os.O_WRONLY | os.O_TRUNC)
    if name.endswith(".py") and not is_written:
        _imports.setdefault(asker, set()).add(name)
    for active in _recordings:
        if is_read and name not in active.written:
            active.files.add(name)
        if is_written:
            active.written.add(name)


def _with_imports(files: set[str]) -> set[str]:
    """Return files, and what the modules among them have imported."""
    found: set[str] = set()
    queue = list(files)
    while queue:
        path = queue.pop()
        if path not in found:
            found.add(path)
            queue += _imports.get(path, ())
    return found


def _asking_user_code(frame: FrameType | None) -> str:
    """Return the user's file that is on the way to this toolkit's next frame, if one is."""
    while frame is not None:
        file = frame.f_code.co_filename
        origin = origin_of(file)
        if origin != "other":
            return file if origin == "user" else ""
        frame = frame.f_back
    return ""


def _direct_origin(frame: FrameType | None) -> str:
    """Return whose code itself asked: libraries read many variables for themselves."""
    while frame is not None and frame.f_code.co_filename in _MAPPINGS:
        frame = frame.f_back
    return origin_of(frame.f_code.co_filename) if frame is not None else "other"


class _Environment(os._Environ[str]):
    """`os.environ`, which tells recordings what is asked of it."""

    def __getitem__(self, key: str) -> str:
        if _recordings and isinstance(key, str) and _direct_origin(sys._getframe(1)) == "user":
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
        """Return all variables, of which none counts as asked for: other processes get them."""
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
"""Files of the functions between `os.environ[…]` or `os.getenv(…)` and who calls them."""


def _digest(value: str | None) -> str | None:
    return None if value is None else hashlib.sha256(os.fsencode(value)).hexdigest()


def _how(before: str | None, now: str | None, appeared: str, gone: str) -> str:
    return appeared if before is None else gone if now is None else "changed"


def _is_below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def _is_special(path: str) -> bool:
    """Whether something is there that is no file with a content of its own."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116 - a string
    except OSError:
        return False
