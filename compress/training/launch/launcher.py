"""Several training processes on this machine and others, under torchrun's elastic agent."""

from __future__ import annotations

import logging
import os
import pickle
import signal
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from compress.common.atomic_files import write_atomically
from compress.common.dependency_recorder import Recording, add_to_recordings
from compress.common.errors import SignalExit, StageFailed
from compress.training.launch.epoch_log import following
from compress.training.launch.multi_node import (
    LUGGAGE,
    RECORDED,
    SECONDS_TO_CONNECT,
    Meeting,
    inviting,
    meeting_of,
    told,
)
from compress.training.launch.network import interface_named, own_address
from compress.training.launch.process_env import (
    SIGNALS,
    exits_noticed,
    own_rendezvous_store,
    own_signals,
    quiet,
    ranks_ignore_sigint,
)
from compress.training.launch.spawn import start_rank
from compress.training.launch.worker_errors import (
    LOGS,
    RankKilled,
    forget_failure,
    one_line,
    read_failure,
    recorded_failure,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from compress.training.loop.job import Job
    from compress.training.loop.step_metrics import EpochMetrics

log = logging.getLogger(__name__)

SECONDS_TO_END = 5


def train_on_ranks(job: Job, tell: Callable[[EpochMetrics], None]) -> None:
    """Train on several processes, and return when all of them have ended.

    When a process is killed all are started again from the last checkpoint. The elastic agent could
    do so too, but it would also repeat errors that come again, and tell the last of them.

    Args:
        job: what to train; it is pickled.
        tell: called in this process, from a thread, after each epoch.

    Raises:
        StageFailed: a rank failed (with that rank's own words), or the job cannot be pickled.
        CompressError: a rank raised that leaf.
    """
    with _luggage_in(job.folder, _pickled(job)):
        for left in reversed(range(job.training.parallel.restarts + 1)):
            try:
                _train_once(job, tell)
                add_to_recordings(
                    Recording.from_json((job.folder / RECORDED).read_text(encoding="utf-8"))
                )
                return
            except RankKilled as error:
                if not left:
                    raise
                log.warning("%s; all are started again from the last checkpoint", error)


def _train_once(job: Job, tell: Callable[[EpochMetrics], None]) -> None:
    meeting = meeting_of(job.training.parallel, job.folder.name)
    forget_failure(job.folder)
    with inviting(job.folder, meeting), following(job.folder, tell):
        run_ranks(meeting, job.folder, hosts=True)


def run_ranks(meeting: Meeting, folder: Path, *, hosts: bool) -> None:
    """Run this node's ranks of a training, and return when those of all nodes have ended.

    A thread must have been started before, to take the signals that the caller's own is deaf to.

    Args:
        meeting: where they meet those of other nodes.
        folder: the training's folder, where the pickled job lies.
        hosts: whether the others come to this node.

    Raises:
        CompressError: a rank failed, or the nodes did not meet.
    """
    try:
        address = own_address(meeting.endpoint, hosts) if meeting.nodes > 1 else "127.0.0.1"
        launch = elastic_launch(_config(meeting, folder, address, hosts), start_rank)
        with ExitStack() as stack:
            for surroundings in (
                quiet(),
                own_signals(),
                own_rendezvous_store(),
                exits_noticed(),
                interface_named(address) if meeting.nodes > 1 else nullcontext(),
                ranks_ignore_sigint(),
            ):
                stack.enter_context(surroundings)
            launch(str(folder), os.getpid())
    except RendezvousError as error:
        raise told(error, folder, meeting, hosts) from None
    except ChildFailedError as error:
        rank, failed = error.get_first_failure()
        raise read_failure(folder, rank, failed.exitcode) from None
    except (ValueError, pickle.UnpicklingError) as error:
        # A full disk cuts what torch itself writes of an error.
        raise (recorded_failure(folder) or StageFailed(one_line(error))) from None
    except SignalException as error:
        # The ranks are gone. A handler of the caller's comes first; else the interpreter exits in
        # order, so that nothing half-written is left, with the shell's code for the signal.
        if callable(signal.getsignal(error.sigval)):
            signal.raise_signal(error.sigval)
        raise SignalExit(128 + error.sigval) from None


def _config(meeting: Meeting, folder: Path, address: str, hosts: bool) -> LaunchConfig:
    logs = folder / LOGS
    logs.mkdir(exist_ok=True)
    return LaunchConfig(
        min_nodes=meeting.nodes,
        max_nodes=meeting.nodes,
        nproc_per_node=meeting.processes,
        run_id=meeting.run_id,
        rdzv_backend="c10d",
        rdzv_endpoint=meeting.endpoint,
        rdzv_configs={
            "join_timeout": meeting.seconds,
            "read_timeout": min(meeting.seconds, SECONDS_TO_CONNECT),
            # torch's guess fails for a name that the host itself does not know, and for two nodes
            # on one machine.
            "is_host": hosts,
        },
        local_addr=address,
        max_restarts=0,
        start_method="spawn",
        signals_to_handle=",".join(SIGNALS),
        shutdown_timeout=SECONDS_TO_END,
        # Ranks are silent: what libraries and the user's code write is kept beside the state.
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )


@contextmanager
def _luggage_in(folder: Path, luggage: bytes) -> Iterator[None]:
    """Keep the pickled job in a file for a block.

    Handed over through a pipe, it would hang this process where a rank dies before it has read it.
    """
    write_atomically(folder / LUGGAGE, luggage)
    try:
        yield
    finally:
        (folder / LUGGAGE).unlink(missing_ok=True)


def _pickled(job: Job) -> bytes:
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise StageFailed(
            f"the data cannot be sent to {job.training.parallel.ranks} processes ({error}); "
            "name it by a data factory, or set parallel.processes to 1"
        ) from error
