"""What one rank of a distributed training does, in a process of its own."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from compress.common.dependency_recorder import recording
from compress.common.errors import Unavailable, exits_refused
from compress.training.distributed.base import process_group
from compress.training.distributed.factory import create_strategy
from compress.training.launch.worker_errors import record_failure
from compress.training.loop.trainer import train

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

    from compress.training.launch.rank_environment import LocalRanks
    from compress.training.loop.job import Job
    from compress.training.loop.step_metrics import TrainingRecord

JOB_FILE = "job.pickle"
TIME_TO_MEET = timedelta(minutes=10)
"""Within which all ranks must have imported what they need; on other machines that may be slow."""
DEPENDENCIES = "dependencies"
"""Key under which rank 0 reports what user code has read."""
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
