"""What one rank of a training does in a process of its own, and how it says why it failed."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from compress.common.dependency_recorder import recording
from compress.common.errors import (
    CompressError,
    StageFailed,
    Unavailable,
    describe_exit_code,
    exits_refused,
)
from compress.data.dataloader import original_error
from compress.training.distributed.base import Strategy, process_group
from compress.training.launch.rank_environment import LOGS, LocalRanks
from compress.training.loop.trainer import train

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from torch._C._distributed_c10d import Store

    from compress.training.config.parallel import Parallel
    from compress.training.loop.metrics import TrainingRecord
    from compress.training.loop.train_state import Job

JOB_FILE = "job.pickle"
TIME_TO_MEET = timedelta(minutes=10)
"""Within which all ranks must have imported what they need; on other machines that may be slow."""
DEPENDENCIES = "dependencies"  # key under which rank 0 reports what user code has read
FINISHED = "finished"
"""Key that a rank sets when its training is over; exit code 0 may be user code that left."""


def run_rank(folder: Path, ranks: LocalRanks, index: int, records: Connection | None) -> bool:
    """Train with the other ranks; return whether that succeeded, or record why it did not.

    ``index`` counts among ``ranks``, and rank 0 sends its records through ``records``, as JSON.
    """

    def on_record(record: TrainingRecord) -> None:
        if records:
            records.send_bytes(record.model_dump_json().encode())

    rank = ranks.first + index
    server = TCPStore(ranks.host, ranks.port, is_master=False, timeout=TIME_TO_MEET)
    store = PrefixStore(ranks.attempt, server)  # keys of earlier attempts are still in the server
    try:
        wait_until_visible(folder, (folder / JOB_FILE).exists)
        job: Job = pickle.loads((folder / JOB_FILE).read_bytes())
        if job.device.startswith("cuda"):
            # One device for each rank of the machine, in order.
            local_rank, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if local_rank >= devices:
                raise Unavailable(
                    f"{os.environ['LOCAL_WORLD_SIZE']} processes need a CUDA device each and there "
                    f"are {devices}; lower parallel.processes"
                )
            torch.cuda.set_device(local_rank)
            job = replace(job, device=f"cuda:{local_rank}")
        with (
            process_group(job.device, store),
            exits_refused(),
            # Rank 0 alone evaluates, and all ranks call the same factories.
            recording() if rank == 0 else nullcontext() as recorded,
        ):
            train(job, create_strategy(job.training.parallel), on_record)
            if recorded:
                store.set(DEPENDENCIES, recorded.to_json())
    except Exception as error:  # noqa: BLE001 - rank 0's parent raises it
        with suppress(OSError):  # a full disk
            traceback.print_exc()  # to this rank's log
        record_failure(store, rank, error)
        return False
    store.set(f"{FINISHED}/{rank}", "")
    return True


def create_strategy(parallel: Parallel) -> Strategy:
    """Create the strategy that the settings name; the process group must have been joined."""
    # Imported only when used: a training in one process needs none of them.
    from compress.training.distributed.ddp import DDPStrategy, DeepSpeedStrategy, Zero1Strategy
    from compress.training.distributed.fsdp import DeviceMeshStrategy, FSDPStrategy

    if parallel.is_mesh:
        return DeviceMeshStrategy(parallel)
    if parallel.sharding_mode is not None:
        return FSDPStrategy(parallel)
    strategies = {"deepspeed": DeepSpeedStrategy, "zero1": Zero1Strategy}
    return strategies.get(parallel.strategy, DDPStrategy)(parallel)


SECONDS_TO_BE_VISIBLE = 30.0
"""NFS clients cache the entries of a folder, by default for up to 30 s (acdirmin)."""
SECONDS_BETWEEN_POLLS = 0.2


def wait_until_visible(path: Path, is_visible: Callable[[], bool]) -> bool:
    """Wait some seconds for what another machine has written; return whether it is visible."""
    deadline = time.monotonic() + SECONDS_TO_BE_VISIBLE
    while not is_visible():
        if time.monotonic() > deadline:
            return False
        # Listing a folder makes an NFS client ask its server.
        with suppress(OSError):
            os.listdir(path.parent)  # noqa: PTH208 - cheaper than a generator that is exhausted
        time.sleep(SECONDS_BETWEEN_POLLS)
    return True


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
