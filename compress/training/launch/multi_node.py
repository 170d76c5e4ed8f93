"""Several machines in one training: the invitation of the first, and what the others do with it.

All that they share is the training's folder, on a file system that every machine has, and the
rendezvous of torchrun's elastic agents. The folder holds a pickle, which can run anything when it
is read: it is trusted as far as the run's directory belongs to the user who joins it, and files of
anybody else are refused.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

from compress.common.atomic_files import write_atomically
from compress.common.config import Count, Settings
from compress.common.errors import ArtifactInvalid, CompressError, PipelineInvalid, StageFailed
from compress.training.config.parallel import RENDEZVOUS
from compress.training.launch.heartbeat import SECONDS_TO_SILENCE, THIS_PROCESS, Pulse, beating
from compress.training.launch.worker_errors import FAILURE, read_failure, record_failure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from compress.training.config.parallel import Parallel

INVITATION = "invitation.json"
LUGGAGE = "luggage.pickle"
RECORDED = "recorded.json"
"""What user code read in the first rank."""
NODES = "nodes"
ONE_MACHINE = "127.0.0.1:0"
SECONDS_TO_CONNECT = 60
SECONDS_FOR_A_FAILURE = 15
"""After another node's failure, until this one no longer waits for its own ranks to notice."""


class Meeting(Settings):
    """Where and how the ranks of one training meet."""

    runner: str = THIS_PROCESS
    """The process that walks the pipeline."""
    run_id: str
    endpoint: str = ONE_MACHINE
    processes: Count
    """Ranks on each node."""
    nodes: Count = 1
    seconds: Count = 600
    """Until all nodes must have come."""


def meeting_of(parallel: Parallel, name: str) -> Meeting:
    """Return a new meeting.

    Raises:
        PipelineInvalid: the environment variable that names the rendezvous does not.
    """
    return Meeting(
        run_id=f"{name}-{uuid.uuid4().hex[:8]}",
        endpoint=endpoint_of(parallel) if parallel.nodes > 1 else ONE_MACHINE,
        processes=parallel.ranks_per_node,
        nodes=parallel.nodes,
        seconds=parallel.rendezvous_seconds,
    )


def endpoint_of(parallel: Parallel) -> str:
    """Return the rendezvous as ``host:port``, from the environment where the setting says so.

    Raises:
        PipelineInvalid: the environment variable is not set, or is no ``host:port``.
    """
    place = parallel.rendezvous or ""
    if not place.startswith("$"):
        return place
    found = os.environ.get(place[1:], "")
    if found.startswith("$") or not re.match(RENDEZVOUS, found):
        raise PipelineInvalid(
            f"parallel.rendezvous is {place}, and that environment variable is "
            f"{found!r}; set it to host:port of the first node"
        )
    return found


@contextmanager
def inviting(folder: Path, meeting: Meeting) -> Iterator[None]:
    """Have other nodes join a training during a block; with one node, do nothing."""
    if meeting.nodes == 1:
        yield
        return
    presence = folder / NODES
    presence.mkdir(exist_ok=True)
    for left_by_a_killed_one in presence.iterdir():
        left_by_a_killed_one.unlink()
    try:
        with beating(presence / this_node()):
            write_atomically(folder / INVITATION, meeting.model_dump_json())
            yield
    finally:
        (folder / INVITATION).unlink(missing_ok=True)


def invitation_in(folder: Path) -> Meeting | None:
    """Return the meeting to which a folder invites, if it does.

    Raises:
        ArtifactInvalid: the invitation is another user's.
    """
    try:
        return Meeting.model_validate_json(own_bytes(folder / INVITATION))
    except FileNotFoundError:
        return None


def own_bytes(file: Path) -> bytes:
    """Return a file's content.

    Raises:
        ArtifactInvalid: it is another user's.
        FileNotFoundError: it is not there.
    """
    with file.open("rb") as stream:
        owner = os.fstat(stream.fileno()).st_uid
        if owner != os.getuid():
            raise ArtifactInvalid(
                f"{file} belongs to user {owner} and this is user {os.getuid()}; it holds code "
                "that would run here, so join only your own runs"
            )
        return stream.read()


@contextmanager
def taking_part(folder: Path, meeting: Meeting) -> Iterator[None]:
    """Show this node to the others during a block.

    Raises:
        StageFailed: all nodes have come already.
    """
    presence = folder / NODES
    with beating(presence / this_node()):
        if nodes_in(folder) > meeting.nodes:
            raise StageFailed(
                f"the run is one of {meeting.nodes} nodes, and they have come; raise "
                "parallel.nodes, or join it from fewer"
            )
        yield


@contextmanager
def leaving_with_the_others(folder: Path) -> Iterator[None]:
    """End this rank, from a thread, once another node has failed or gives no sign of life.

    A lost connection is mostly noticed by the rank itself; NCCL, and a machine without power, may
    keep it waiting for ever.
    """
    if os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"]:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(folder, over), daemon=True)
    thread.start()
    yield
    over.set()


def _watch(folder: Path, over: threading.Event) -> None:
    pulses: dict[str, Pulse] = {}
    failed_at: float | None = None
    while not over.wait(1.0):
        if lost := _silent_node(folder, pulses):
            silence = f"no sign of life for {SECONDS_TO_SILENCE:.0f} s"
            error = StageFailed(f"node {lost} has given {silence}")
            record_failure(folder, int(os.environ["RANK"]), error)
            os._exit(1)
        if (folder / FAILURE).exists():
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > SECONDS_FOR_A_FAILURE:
                os._exit(1)


def _silent_node(folder: Path, pulses: dict[str, Pulse]) -> str | None:
    """Listen to every node, and return the name of one that has fallen silent, if one has."""
    with suppress(FileNotFoundError):  # the training is over, and its folder removed
        for file in (folder / NODES).iterdir():
            pulse = pulses.setdefault(file.name, Pulse(file))
            pulse.listen()
            # One whose file is gone has said goodbye.
            if pulse.silent_seconds > SECONDS_TO_SILENCE and file.exists():
                return file.name
    return None


def nodes_in(folder: Path) -> int:
    """Return the number of nodes that take part in a folder's training."""
    return len(list((folder / NODES).iterdir()))


def this_node() -> str:
    """Return a name that no other node of a training has."""
    return f"{socket.gethostname()}-{os.getpid()}"


def told(error: RendezvousError, folder: Path, meeting: Meeting, hosts: bool) -> CompressError:
    """Return what to raise for a rendezvous that failed."""
    place = f"rendezvous {meeting.endpoint}"
    if (folder / FAILURE).exists():
        return read_failure(folder, 0, 1)
    if isinstance(error, RendezvousTimeoutError):
        came = nodes_in(folder)
        mend = "start `compress join` with the run's directory on the others"
        if came >= meeting.nodes:
            mend = f"they saw the run's directory but did not reach {meeting.endpoint}"
        return StageFailed(
            f"{place}: {came} of {meeting.nodes} nodes came within {meeting.seconds} s "
            f"(parallel.rendezvous_seconds); {mend}"
        )
    if "EADDRINUSE" in str(error.__cause__):
        return StageFailed(
            f"{place}: the port is taken by another program; set parallel.rendezvous to a free one"
        )
    if hosts:
        return StageFailed(
            f"{place} cannot be reached from this machine, which must be it; set "
            "parallel.rendezvous to this machine's name and a free port"
        )
    return StageFailed(f"{place} cannot be reached from node {socket.gethostname()}")
