"""One folder for a run's temporary files; the next run removes it if this one is killed."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver, resource_sharer
from pathlib import Path
from typing import Any

from compress.common.atomic_files import create_locked, remove_unlocked

FOLDER_PREFIX = "compress-run-"
INDUCTOR_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def temporary_files() -> Iterator[None]:
    """Put temporary files of this process and its children into one folder, removed at the end."""
    place = Path(tempfile.gettempdir())
    for old in place.glob(f"{FOLDER_PREFIX}*"):
        remove_unlocked(old)
    folder, lock = create_locked(
        lambda: place / f"{FOLDER_PREFIX}{uuid.uuid4().hex}", partial(Path.mkdir, mode=0o700)
    )
    # TorchInductor's cache should survive the run: compiling again is slow.
    os.environ.setdefault(INDUCTOR_CACHE_VARIABLE, str(place / f"torchinductor_{os.getuid()}"))
    sockets: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    before = tempfile.tempdir, os.environ.get("TMPDIR"), sockets.get("tempdir")
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    # multiprocessing caches its own folder and would use it at exit, after it is removed.
    sockets["tempdir"] = str(folder)
    try:
        yield
    finally:
        # The resource sharer and the forkserver keep the path of their socket for ever; ended, they
        # restart when needed.
        sharer: Any = vars(resource_sharer)["_resource_sharer"]
        server: Any = vars(forkserver)["_forkserver"]
        with suppress(OSError):
            if str(sharer._address).startswith(f"{folder}/"):
                sharer.stop()
        with suppress(OSError):
            if str(server._forkserver_address).startswith(f"{folder}/"):
                server._stop()
        tempfile.tempdir, variable, sockets["tempdir"] = before
        del os.environ["TMPDIR"]
        if variable is not None:
            os.environ["TMPDIR"] = variable
        # Imported during the run, torch (2.11 to 2.13) keeps precompiled C++ headers in the
        # temporary folder of that moment, and never looks again whether they are there.
        codecache: Any = sys.modules.get("torch._inductor.codecache")
        if codecache is not None and str(codecache._HEADER_DIR).startswith(f"{folder}/"):
            headers = Path(os.environ[INDUCTOR_CACHE_VARIABLE]) / "precompiled_headers"
            codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = str(headers), str(headers / "locks")
            codecache._precompile_header.cache_clear()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
