"""Checks that a process on another machine sees the run's files and has its packages."""

from __future__ import annotations

import os
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from compress.common.atomic_files import write_atomically
from compress.common.errors import StageFailed
from compress.training.launch.worker import wait_until_visible
from pipelines.system.machine_info import versions

if TYPE_CHECKING:
    from collections.abc import Mapping

RUN_ID = "run-id"
"""File in a store, by which another machine sees that it has the same folder."""
REMEDY = (
    "all nodes need the folder of results, the pipeline's and the working directory on a file "
    "system that they share, under the same paths"
)


def write_run_id(store: Path) -> None:
    """Mark a store as this run's."""
    write_atomically(store / RUN_ID, uuid.uuid4().hex)


def read_run_id(store: Path) -> str | None:
    """Return the id of the last run of a store; None where it is not there."""
    with suppress(OSError):
        return (store / RUN_ID).read_text(encoding="utf-8")
    return None


@dataclass(frozen=True)
class RunEnvironment:
    """Where a run works, and with which packages."""

    store: str
    """Absolute path."""
    run_id: str | None
    folder: str
    """The working directory."""
    versions: Mapping[str, str]

    @classmethod
    def of_this_process(cls, store: Path) -> Self:
        """Return what processes on other machines must find to work for this one."""
        return cls(str(store.absolute()), read_run_id(store), str(Path.cwd()), versions())

    def enter(self) -> None:
        """Change to the run's working directory, where this machine has the same one.

        Raises:
            StageFailed: it has not, and would read and write other files; or it has other packages.
        """
        store, here = Path(self.store), f"node {socket.gethostname()}"
        if not wait_until_visible(store, lambda: read_run_id(store) == self.run_id):
            what = f"another {store}" if store.exists() else f"no {store}"
            raise StageFailed(f"{here} has {what}; {REMEDY}")
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise StageFailed(f"{here} has no {self.folder} ({error.strerror}); {REMEDY}") from None
        # A cache key has the versions of the machine that the run was started on.
        own = versions()
        for name in sorted({*self.versions, *own}):
            expected, found = self.versions.get(name, "none"), own.get(name, "none")
            if found != expected:
                raise StageFailed(
                    f"{here} has {name} {found}, and the run has {expected}; all nodes need the "
                    "same packages"
                )
