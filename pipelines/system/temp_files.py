"""Temporary files of a run in one folder, which the next run removes where this one was killed."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_sharer
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "compress-run-"
COMPILED = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def temporary_files() -> Iterator[None]:
    """Have all temporary files of this process, and of those that it starts, in one folder."""
    place = Path(tempfile.gettempdir())
    _remove_leftovers_of_killed_runs(place)
    folder, lock = _own_folder(place)
    # What torch has compiled is worth keeping.
    os.environ.setdefault(COMPILED, str(place / f"torchinductor_{os.getuid()}"))
    sockets: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    before = tempfile.tempdir, os.environ.get("TMPDIR"), sockets.get("tempdir")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    # A folder that multiprocessing made itself it would keep using, and miss when Python ends.
    sockets["tempdir"] = str(folder)
    try:
        yield
    finally:
        _end_listeners(folder)
        tempfile.tempdir, variable, sockets["tempdir"] = before
        del os.environ["TMPDIR"]
        if variable is not None:
            os.environ["TMPDIR"] = variable
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _end_listeners(folder: Path) -> None:
    """End what multiprocessing has listening in a folder; it begins anew elsewhere when needed.

    Its queues of open files, and its server that forks, keep their socket's name for ever.
    """
    sharer: Any = vars(resource_sharer)["_resource_sharer"]
    server: Any = vars(forkserver)["_forkserver"]
    with suppress(OSError):
        if str(sharer._address).startswith(f"{folder}/"):
            sharer.stop()
    with suppress(OSError):
        if str(server._forkserver_address).startswith(f"{folder}/"):
            server._stop()


def _own_folder(place: Path) -> tuple[Path, int]:
    """Return a new folder, and a descriptor that locks it until this process dies."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        with suppress(FileNotFoundError):  # another run took it for a dead one's
            lock = os.open(folder, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_leftovers_of_killed_runs(place: Path) -> None:
    """Remove what killed runs left: the kernel gave their locks back."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is another user's, or of a run that lives
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
