"""What one rank of a training does, in a process of its own."""

from __future__ import annotations

import os
import pickle
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from compress.common.atomic_files import write_atomically
from compress.common.dependency_recorder import recording
from compress.common.errors import Unavailable, exits_refused
from compress.training.distributed.base import process_group
from compress.training.distributed.factory import create_strategy
from compress.training.launch.epoch_log import append_epoch
from compress.training.launch.multi_node import LUGGAGE, RECORDED, leaving_with_the_others
from compress.training.launch.worker_errors import is_lost_peer, record_failure
from compress.training.loop.trainer import train

if TYPE_CHECKING:
    from pathlib import Path

    from compress.training.loop.job import Job

SECONDS_FOR_THE_CULPRIT = 5


def run_rank(folder: Path) -> None:
    """Train with the other ranks; where that fails, leave the reason in the training's folder."""
    rank = int(os.environ["RANK"])
    try:
        job: Job = pickle.loads((folder / LUGGAGE).read_bytes())
        job = replace(job, device=_own_device(job.device))
        with (
            leaving_with_the_others(folder),
            process_group(job.device),
            exits_refused(),
            recording() as recorded,
        ):
            train(job, create_strategy(job.training.parallel), partial(append_epoch, folder))
            if rank == 0:  # which alone evaluates; all call the same factories
                write_atomically(folder / RECORDED, recorded.to_json())
    except Exception as error:
        if is_lost_peer(error):
            time.sleep(SECONDS_FOR_THE_CULPRIT)  # the agent ends this rank, and names the other one
        record_failure(folder, rank, error)
        with suppress(OSError):  # a full disk
            traceback.print_exc()  # to this rank's log
        raise


def _own_device(device: str) -> str:
    """Return this rank's device: one CUDA device for each, in order.

    Raises:
        Unavailable: there are fewer devices than ranks.
    """
    if not device.startswith("cuda"):
        return device
    import torch

    own, found = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if own >= found:
        raise Unavailable(
            f"{os.environ['LOCAL_WORLD_SIZE']} processes want a CUDA device each and there are "
            f"{found}; lower parallel.processes"
        )
    torch.cuda.set_device(own)
    return f"cuda:{own}"
