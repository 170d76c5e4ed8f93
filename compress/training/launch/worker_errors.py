"""The root cause of a failed training: recorded by the rank where it happened, raised by rank 0."""

from __future__ import annotations

import json
import re
import signal
import time
from typing import TYPE_CHECKING

from compress.common.errors import CompressError, StageFailed, describe_exit_code
from compress.data.dataloader import original_error
from compress.training.launch.rank_environment import LOGS

if TYPE_CHECKING:
    from pathlib import Path

    from torch._C._distributed_c10d import Store

FAILURE = "failure"
SECONDS_FOR_THE_CAUSE = 5
"""How long a rank that lost its connection waits for the rank that failed to say why."""
LOST_CONNECTION = re.compile(
    # gloo names its source file; NCCL's errors are worded by NCCL and by torch's NCCLUtils.cpp and
    # ProcessGroupNCCL.cpp.
    r"gloo/transport"
    r"|remote process exit(ed|ing)|unexpected exit of a remote peer"
    r"|NCCL communicator was aborted"
    r"|Watchdog caught collective operation timeout"
)
"""Found in errors of a collective whose other processes do not answer any more."""
WATCHDOG = re.compile(r"Watchdog caught collective operation timeout[^\n]*|NCCL error[^\n]*")


class RankKilled(StageFailed):
    """A process was ended from outside, and may succeed when it is started again."""


ERROR_TYPES: dict[str, type[CompressError]] = {
    error.__name__: error for error in (*CompressError.__subclasses__(), RankKilled)
}


def one_line(error: Exception) -> str:
    """Return the first line of an error's message, after the type of a foreign one."""
    error = original_error(error)  # a data worker's death is raised wherever the process is
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else ""
    if isinstance(error, CompressError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def record_failure(store: Store, rank: int, error: Exception) -> None:
    """Record why a global rank failed, unless another rank has recorded a failure before."""
    error = original_error(error)
    message = one_line(error)
    # A lost connection is a consequence: it is recorded only where no rank gives the cause.
    is_consequence = LOST_CONNECTION.search(str(error)) is not None
    deadline = time.monotonic() + SECONDS_FOR_THE_CAUSE
    while is_consequence and not store.check([FAILURE]) and time.monotonic() < deadline:
        time.sleep(0.1)
    if isinstance(error, CompressError):
        pass
    elif is_consequence:
        message = (
            f"rank {rank} lost the connection to another process, which ended without an error; "
            f"see its output, and the files in {LOGS} of the training's folder"
        )
    else:
        message = f"rank {rank}: {message}"
    record = {"type": type(error).__name__, "message": message}
    # In the key-value store through which the ranks meet, not on disk, which may be full.
    store.compare_set(FAILURE, "", json.dumps(record))  # atomic: the first failure stays


def recorded_failure(store: Store) -> CompressError | None:
    """Return the error that the first rank to fail has recorded."""
    if not store.check([FAILURE]):
        return None
    record = json.loads(store.get(FAILURE))
    return ERROR_TYPES.get(record["type"], StageFailed)(record["message"])


def error_of_exit(rank: int, exit_code: int, log: Path) -> StageFailed:
    """Return the error for a rank that ended without recording one; signals are negative codes."""
    if exit_code < 0:
        # torch's watchdog over NCCL ends the process of a collective that failed or hangs.
        printed = log.read_text(errors="replace") if log.exists() else ""
        watchdog = WATCHDOG.search(printed) if exit_code == -signal.SIGABRT else None
        why = f" ({watchdog[0]})" if watchdog else ""
        return RankKilled(f"rank {rank} {describe_exit_code(exit_code)}{why}")
    if exit_code == 0:
        return StageFailed(
            f"rank {rank} ended with exit code 0 before its training was over; code of the model "
            "or the data ended its process"
        )
    return StageFailed(
        f"rank {rank} ended with exit code {exit_code} before training began; a script that "
        'trains with several processes must start under `if __name__ == "__main__":`'
    )
