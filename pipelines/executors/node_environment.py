"""What a process on another node must find as the run has it, before it works for the run."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from compress.common.errors import StageFailed
from pipelines.executors.join import advertised_run
from pipelines.system.machine_info import versions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SECONDS_TO_BE_SEEN = 30.0
"""Within which one node sees what another has written: NFS keeps what it knows of a folder."""
SECONDS_BETWEEN_LOOKS = 0.2
MEND = (
    "all nodes need the folder of results, the pipeline's and the working directory on a file "
    "system that they share, under the same paths"
)


@dataclass(frozen=True)
class Surroundings:
    """Where a run works, and with which packages."""

    store: Path
    run: str | None
    """The name that the run has written there."""
    folder: Path
    """The working directory."""
    versions: Mapping[str, str]

    @classmethod
    def of_run(cls, store: Path) -> Self:
        """Return those of the run that holds a store in this process."""
        return cls(store.absolute(), advertised_run(store), Path.cwd(), versions())

    def enter(self) -> None:
        """Go to the run's working directory, where this node has the same.

        Raises:
            StageFailed: it has not: what it would read and write were other files.
        """
        if not seen(self.store, lambda: advertised_run(self.store) == self.run):
            what = f"another {self.store}" if self.store.exists() else f"no {self.store}"
            raise StageFailed(f"{_here()} has {what}; {MEND}")
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise StageFailed(
                f"{_here()} has no {self.folder} ({error.strerror}); {MEND}"
            ) from None
        for name in sorted({*self.versions, *versions()}):
            theirs, ours = self.versions.get(name, "none"), versions().get(name, "none")
            if ours != theirs:
                raise StageFailed(
                    f"{_here()} has {name} {ours}, and the run has {theirs}; all nodes need the "
                    "same packages"
                )


def seen(path: Path, there: Callable[[], bool]) -> bool:
    """Whether something at a path is there, or is seen here within some seconds."""
    deadline = time.monotonic() + SECONDS_TO_BE_SEEN
    while not there():
        if time.monotonic() > deadline:
            return False
        with suppress(OSError):
            os.listdir(path.parent)  # noqa: PTH208 - has NFS ask its server anew
        time.sleep(SECONDS_BETWEEN_LOOKS)
    return True


def _here() -> str:
    return f"node {socket.gethostname()}"
