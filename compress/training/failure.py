"""The root cause of a failed training, told by the rank where it happened."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

from compress.core.errors import CompressError, StageFailed

if TYPE_CHECKING:
    from pathlib import Path

FAILURE = "failure.json"
LEAVES = {leaf.__name__: leaf for leaf in CompressError.__subclasses__()}


def one_line(error: Exception) -> str:
    """Return an error's own words; a foreign error's type comes first."""
    lines = str(error).strip().splitlines()
    words = lines[0] if lines else ""
    if isinstance(error, CompressError):
        return words
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def is_lost_peer(error: Exception) -> bool:
    """Whether an error only says that another rank is gone."""
    return "gloo/transport" in str(error)


def record_failure(folder: Path, rank: int, error: Exception) -> None:
    """Write why a rank failed, unless another rank failed before it."""
    own = folder / f"{FAILURE}.{rank}"
    foreign = not isinstance(error, CompressError)
    message = f"rank {rank}: {one_line(error)}" if foreign else one_line(error)
    own.write_text(json.dumps({"leaf": type(error).__name__, "message": message}), encoding="utf-8")
    try:
        os.link(own, folder / FAILURE)  # atomic, and refused when the name is taken: the first wins
    except FileExistsError:
        pass
    finally:
        own.unlink()


def read_failure(folder: Path, rank: int, exit_code: int) -> CompressError:
    """Return the error to raise for a failed training.

    Args:
        folder: where ranks write their failures.
        rank: the rank that was seen to end first.
        exit_code: how it ended; negative for a signal.
    """
    file = folder / FAILURE
    if exit_code < 0 and not file.exists():
        name = signal.Signals(-exit_code).name
        hint = "; perhaps memory ran out" if name == "SIGKILL" else ""
        return StageFailed(f"rank {rank} was ended by {name}{hint}")
    if not file.exists():
        return StageFailed(
            f"rank {rank} ended with exit code {exit_code} before training began; a script that "
            'trains with several processes must start under `if __name__ == "__main__":`'
        )
    record = json.loads(file.read_text(encoding="utf-8"))
    return LEAVES.get(record["leaf"], StageFailed)(record["message"])


def forget_failure(folder: Path) -> None:
    """Remove what an earlier attempt left."""
    (folder / FAILURE).unlink(missing_ok=True)
