"""Several training processes on this machine and others, under torchrun's elastic agent."""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import signal
import time
import traceback
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from compress.core.errors import StageFailed, Unavailable
from compress.core.files import write_atomically
from compress.training.addresses import interface_named, own_address
from compress.training.failure import (
    LOGS,
    RankKilled,
    forget_failure,
    is_lost_peer,
    one_line,
    read_failure,
    record_failure,
    recorded_failure,
)
from compress.training.journal import append_epoch, following
from compress.training.loop import Job, train
from compress.training.nodes import (
    LUGGAGE,
    SECONDS_TO_CONNECT,
    Meeting,
    inviting,
    leaving_with_the_others,
    meeting_of,
    told,
)
from compress.training.strategy import process_group, strategy_of
from compress.training.surroundings import (
    SIGNALS,
    own_rendezvous_store,
    own_signals,
    quiet,
    ranks_deaf_to_ctrl_c,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compress.training.watch import MeasuredEpoch

log = logging.getLogger(__name__)

SECONDS_FOR_THE_CULPRIT = 5
SECONDS_TO_END = 5


def train_on_ranks(job: Job, tell: Callable[[MeasuredEpoch], None]) -> None:
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
                return
            except RankKilled as error:
                if not left:
                    raise
                log.warning("%s; all are started again from the last checkpoint", error)


def _train_once(job: Job, tell: Callable[[MeasuredEpoch], None]) -> None:
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
        launch = elastic_launch(_config(meeting, folder, address, hosts), _rank)
        with ExitStack() as stack:
            for surroundings in (
                quiet(),
                own_signals(),
                own_rendezvous_store(),
                interface_named(address) if meeting.nodes > 1 else nullcontext(),
                ranks_deaf_to_ctrl_c(),
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
        raise SystemExit(128 + error.sigval) from None


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


def _rank(folder: str, agent: int) -> None:
    """Run one rank; the elastic agent calls this in a process of its own."""
    if os.getppid() != agent:  # torch had this process die with its agent, which was dead already
        os._exit(1)
    # Ctrl-C reaches the whole terminal: end without a traceback, the parent tells the story.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    place, rank = Path(folder), int(os.environ["RANK"])
    try:
        job: Job = pickle.loads((place / LUGGAGE).read_bytes())
        job = replace(job, device=_own_device(job.device))
        with _leaving_at_once(), leaving_with_the_others(place), process_group(job.device):
            train(job, strategy_of(job.training.parallel), partial(append_epoch, place))
    except SystemExit as end:
        called = StageFailed(f"rank {rank}: the model's or data's code called sys.exit({end.code})")
        record_failure(place, rank, called)
        raise called from end
    except Exception as error:
        if is_lost_peer(error):
            time.sleep(SECONDS_FOR_THE_CULPRIT)  # the agent ends this rank, and names the other one
        record_failure(place, rank, error)
        with suppress(OSError):  # a full disk
            traceback.print_exc()  # to this rank's log
        raise


@contextmanager
def _leaving_at_once() -> Iterator[None]:
    """Let this process end without taking the interpreter apart, after all other exit handlers.

    Gloo's threads outlive the process group, which torch itself still refers to. One that lets go
    of a tensor while Python finalizes is ended inside a destructor, and that aborts the process
    ("terminate called without an active exception"): a finished training would seem a failed one.
    """
    codes = [1]
    atexit.register(lambda: os._exit(codes[-1]))  # the first to register is the last to run
    yield
    codes.append(0)


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


def _pickled(job: Job) -> bytes:
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise StageFailed(
            f"the data cannot be sent to {job.training.parallel.ranks} processes ({error}); "
            "name it by a data factory, or set parallel.processes to 1"
        ) from error
