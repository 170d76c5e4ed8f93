"""The root cause of a failed training, told by the rank where it happened."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from compress.common.errors import CompressError, StageFailed, describe_exit_code
from compress.data.dataloader import original_error
from compress.training.checkpoint.metadata import remove_unfinished

if TYPE_CHECKING:
    from pathlib import Path

FAILURE = "failure.json"
LOGS = "logs"


class RankKilled(StageFailed):
    """A process was ended from outside, and may do better when it is started again."""


LEAVES: dict[str, type[CompressError]] = {
    leaf.__name__: leaf for leaf in (*CompressError.__subclasses__(), RankKilled)
}


def one_line(error: Exception) -> str:
    """Return an error's own words; a foreign error's type comes first."""
    # A data worker's death is raised in whatever the process is doing.
    error = original_error(error)
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
    error = original_error(error)
    foreign = not isinstance(error, CompressError)
    message = f"rank {rank}: {one_line(error)}" if foreign else one_line(error)
    if is_lost_peer(error):
        message = (
            f"rank {rank} lost another process, which ended without an error; "
            f"their logs are in {folder / LOGS}"
        )
    text = json.dumps({"leaf": type(error).__name__, "message": message})
    try:
        own.write_text(text, encoding="utf-8")
    except OSError:
        remove_unfinished(folder)  # on a full disk, a checkpoint that will not be finished
        own.write_text(text, encoding="utf-8")
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
    if found := recorded_failure(folder):
        return found
    if exit_code < 0:
        return RankKilled(f"rank {rank} {describe_exit_code(exit_code)}")
    if exit_code == 0:
        return StageFailed(
            f"rank {rank} ended with exit code 0 before its training was over; code of the model "
            "or the data ended its process"
        )
    return StageFailed(
        f"rank {rank} ended with exit code {exit_code} before training began; a script that "
        'trains with several processes must start under `if __name__ == "__main__":`'
    )


def recorded_failure(folder: Path) -> CompressError | None:
    """Return what the first rank that failed has written, if one has."""
    file = folder / FAILURE
    if not file.exists():
        return None
    record = json.loads(file.read_text(encoding="utf-8"))
    return LEAVES.get(record["leaf"], StageFailed)(record["message"])


def forget_failure(folder: Path) -> None:
    """Remove what an earlier attempt left."""
    for file in folder.glob(f"{FAILURE}*"):
        file.unlink()
