"""What one rank of a distributed training does, in a process of its own."""

from __future__ import annotations

import os
import pickle
import traceback
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from compress.common.dependency_recorder import recording
from compress.common.errors import Unavailable, exits_refused
from compress.training.distributed.base import process_group
from compress.training.distributed.factory import create_strategy
from compress.training.launch.shared_folder import wait_until_visible
from compress.training.launch.worker_errors import record_failure
from compress.training.loop.trainer import train

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

    from compress.training.launch.rank_environment import LocalRanks
    from compress.training.loop.job import Job
    from compress.training.loop.step_metrics import EpochMetrics

JOB_FILE = "job.pickle"
TIME_TO_MEET = timedelta(minutes=10)
"""Within which all ranks must have imported what they need; on other machines that may be slow."""
DEPENDENCIES = "dependencies"
"""Key under which rank 0 reports what user code has read."""
FINISHED = "finished"
"""Key that a rank sets when its training is over; exit code 0 may be user code that left."""


def run_rank(folder: Path, ranks: LocalRanks, index: int, epochs: Connection | None) -> bool:
    """Train with the other ranks; return whether that succeeded, or record why it did not.

    Args:
        folder: the training's folder, which holds the pickled job.
        ranks: those that this process's parent starts.
        index: this rank's among them.
        epochs: where rank 0 reports each epoch, as JSON.
    """
    rank = ranks.first + index
    server = TCPStore(ranks.host, ranks.port, is_master=False, timeout=TIME_TO_MEET)
    store = PrefixStore(ranks.attempt, server)
    try:
        wait_until_visible(folder, (folder / JOB_FILE).exists)
        job: Job = pickle.loads((folder / JOB_FILE).read_bytes())
        job = replace(job, device=_own_device(job.device))
        with (
            process_group(job.device, store),
            exits_refused(),
            # Rank 0 alone evaluates, and all ranks call the same factories.
            recording() if rank == 0 else nullcontext() as recorded,
        ):
            train(job, create_strategy(job.training.parallel), partial(_report_epoch, epochs))
            if recorded:
                store.set(DEPENDENCIES, recorded.to_json())
    except Exception as error:  # noqa: BLE001 - rank 0's parent raises it
        with suppress(OSError):  # a full disk
            traceback.print_exc()  # to this rank's log
        record_failure(store, rank, error)
        return False
    store.set(f"{FINISHED}/{rank}", "")
    return True


def _report_epoch(epochs: Connection | None, epoch: EpochMetrics) -> None:
    if epochs:
        epochs.send_bytes(epoch.model_dump_json().encode())


def _own_device(device: str) -> str:
    """Return this rank's device: one CUDA device for each rank of the machine, in order.

    Raises:
        Unavailable: there are fewer devices than ranks.
    """
    if not device.startswith("cuda"):
        return device
    local_rank, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local_rank >= devices:
        raise Unavailable(
            f"{os.environ['LOCAL_WORLD_SIZE']} processes need a CUDA device each and there are "
            f"{devices}; lower parallel.processes"
        )
    torch.cuda.set_device(local_rank)
    return f"cuda:{local_rank}"
