"""The processes that torchrun or srun has started for one run, on one machine or several.

Rank 0 runs the pipeline. The others wait for its requests, which travel through the key-value store
that torchrun or rank 0 serves (`torch.distributed.TCPStore`), and take part in each training.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from compress.common.errors import CompressError, PipelineInvalid, StageFailed, first_line
from compress.common.lazy_modules import torch
from compress.training.config.parallel import TORCHRUN, Parallel
from compress.training.launch.rank_environment import LocalRanks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from compress.training.loop.metrics import OnRecord

SECONDS_BETWEEN_BEATS = 2.0
SECONDS_TO_BE_LOST = 120.0
"""Longer than a process may be busy in an extension that lets no other thread of Python run."""


class Heartbeat:
    """A thread that counts in the key-value store, and watches the counts of other ranks."""

    def __init__(self, store: Store, rank: int, watched: Iterable[int]) -> None:
        self.store: Any = store  # torch's types lack `clone`
        self.rank, self.watched = rank, list(watched)
        self.lost: str | None = None  # what to say of a rank that has stopped counting

    def start(self) -> None:
        """Count from now on, until this process ends or the store does."""
        # A connection of its own: a request on the other would wait for the answer to this one.
        self.store = self.store.clone()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def raise_if_lost(self) -> None:
        """Raise StageFailed if a watched rank has stopped counting."""
        if self.lost:
            raise StageFailed(self.lost)

    def _run(self) -> None:
        seen: dict[int, tuple[bytes, float]] = {}
        for count in range(2**62):
            try:
                self.store.set(f"alive/{self.rank}", str(count))
                for rank in self.watched:
                    key, now = f"alive/{rank}", time.monotonic()
                    value = self.store.get(key) if self.store.check([key]) else b""
                    before, since = seen.setdefault(rank, (value, now))
                    if value != before:
                        seen[rank] = value, now
                    elif now - since > SECONDS_TO_BE_LOST:
                        self.lost = (
                            f"rank {rank} has sent no heartbeat for {SECONDS_TO_BE_LOST:.0f} s: "
                            "its machine or the network failed, or something has stopped it"
                        )
            except RuntimeError:  # the store has ended, as whoever uses it reports
                return
            time.sleep(SECONDS_BETWEEN_BEATS)


SECONDS_TO_MEET = 600  # within which all processes must have started
SECONDS_TO_ANSWER = 120
"""Within which a process that waits for requests answers one; it looks every tenth of a second."""
SECONDS_TO_LEAVE = 15
"""Within which they end a training that rank 0 has left, and answer that they leave."""
SECONDS_BETWEEN_POLLS = 0.1
SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

_joined: list[RankGroup] = []
nodes_by_engine: ContextVar[bool] = ContextVar("nodes_by_engine", default=False)
"""Whether stages with a training on several machines are sent to an engine that has these."""


def launched_environment(environment: Mapping[str, str]) -> dict[str, str] | None:
    """Return what torchrun sets for a process; None where this one was started alone."""
    needed = (*SET_BY_TORCHRUN[:4], "MASTER_ADDR", "MASTER_PORT")
    if all(name in environment for name in needed):
        return {name: environment[name] for name in needed}
    # Under srun it follows from Slurm's own variables; in a batch script this one is not set.
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if int(tasks) == 1 or "SLURM_PROCID" not in environment:
        return None
    host = environment.get("MASTER_ADDR")
    if not host:
        nodes = environment["SLURM_STEP_NODELIST"]
        try:
            command = ["scontrol", "show", "hostnames", nodes]
            names = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=SECONDS_TO_ANSWER
            )
            host = names.stdout.split()[0]
        except (OSError, subprocess.SubprocessError, IndexError) as error:
            raise StageFailed(
                f"`scontrol show hostnames {nodes}` does not name the first host of this step "
                f"({error}); set MASTER_ADDR to it"
            ) from error
    # The port depends on the job, so that two jobs on one machine do not collide.
    job, step = (int(environment.get(f"SLURM_{name}", 0)) for name in ("JOB_ID", "STEP_ID"))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(int(tasks) // int(environment["SLURM_STEP_NUM_NODES"])),
        "MASTER_ADDR": host,
        "MASTER_PORT": environment.get("MASTER_PORT") or str(20_000 + (job + step) % 20_000),
    }


def joined_group() -> RankGroup | None:
    """Return the processes that were started together with this one; None where it is alone."""
    return _joined[-1] if _joined else None


def need_group(parallel: Parallel) -> None:
    """Refuse a training on several machines that needs other processes than were started."""
    group = joined_group()
    if parallel.nodes == 1 or (group.fits(parallel) if group else parallel.min_nodes == 1):
        return
    started = "this process was started alone"
    if group:
        each = group.local_world_size
        started = f"{group.nodes} machines with {each} processes each were started"
    nodes = f"{parallel.min_nodes}:{parallel.nodes}" if parallel.min_nodes else parallel.nodes
    command = TORCHRUN.format(nodes=nodes, processes=parallel.processes)
    raise PipelineInvalid(
        f"parallel has nodes: {parallel.nodes} and processes: {parallel.processes}, and {started}; "
        f"run on every machine: {command}"
    )


class RankGroup:
    """All processes of a run, as one of them sees them."""

    def __init__(self, environment: Mapping[str, str], store: Store) -> None:
        self.rank, self.world_size, self.local_rank, self.local_world_size = (
            int(environment[name]) for name in SET_BY_TORCHRUN[:4]
        )
        self.nodes = self.world_size // self.local_world_size
        self.host, self.port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        self.server = self.store = store
        others = [0] if self.rank else range(1, self.world_size)
        self._heartbeat = Heartbeat(store, self.rank, others)
        self._requests = itertools.count(1)

    @classmethod
    def join(cls, environment: Mapping[str, str]) -> Self:
        """Meet the other processes, in the environment of :func:`launched_environment`."""
        os.environ.update(environment)
        where = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
        timeout = timedelta(seconds=SECONDS_TO_MEET)
        try:
            meeting = torch.distributed.rendezvous("env://", timeout=timeout)  # type: ignore[attr-defined]
            store, _, _ = next(meeting)
        except (RuntimeError, ValueError) as error:
            raise StageFailed(
                f"rank {environment['RANK']}: the {environment['WORLD_SIZE']} processes of the run "
                f"did not meet at {where} within {SECONDS_TO_MEET} s ({first_line(error)})"
            ) from error
        # What is started from here on is no rank: user code that reads these variables, on which
        # a cached artifact then depends, finds what it finds without torchrun.
        for name in SET_BY_TORCHRUN:
            os.environ.pop(name, None)
        group = cls(environment, store)
        group._meet()
        _joined.append(group)
        return group

    def _meet(self) -> None:
        """Find the processes that were started together with this one.

        torchrun restarts processes with a store that may hold the keys of earlier ones: rank 0
        names a prefix for all keys of this start to each rank that has just introduced itself.
        """
        own, deadline = uuid.uuid4().hex, time.monotonic() + SECONDS_TO_MEET
        prefix, missing = own, set(range(1, self.world_size))
        if self.rank:
            prefix, missing = "", {0}
            self.server.set(f"introduced/{self.rank}", own)
        while missing:
            if time.monotonic() > deadline:
                raise StageFailed(
                    f"rank {self.rank}: the {self.world_size} processes of the run did not meet "
                    f"within {SECONDS_TO_MEET} s"
                )
            for rank in sorted(missing):
                if rank == 0 and self.server.check([f"prefix/{own}"]):
                    prefix = self.server.get(f"prefix/{own}").decode()
                    self.server.set(f"{prefix}/joined/{self.rank}", "")
                    missing.discard(rank)
                elif self.server.check([f"{own}/joined/{rank}"]):
                    missing.discard(rank)
                elif rank and self.server.check([f"introduced/{rank}"]):
                    # Perhaps an earlier process: until the present one answers, look again.
                    name = self.server.get(f"introduced/{rank}").decode()
                    self.server.set(f"prefix/{name}", own)
            time.sleep(SECONDS_BETWEEN_POLLS if missing else 0)
        self.store = torch.distributed.PrefixStore(prefix, self.server)  # type: ignore[attr-defined]
        self._heartbeat.store = self.store
        self._heartbeat.start()

    def fits(self, parallel: Parallel) -> bool:
        """Whether the processes, of some machines or all, can share a training's ranks equally."""
        enough = parallel.nodes == self.nodes
        if parallel.min_nodes:
            enough = parallel.min_nodes <= self.nodes
        return enough and parallel.ranks_per_node % self.local_world_size == 0

    def request(self, command: str, seconds: float = SECONDS_TO_ANSWER, **content: Any) -> None:
        """Have all other processes do something, and wait until each has answered.

        Raises PipelineInvalid if one cannot do it, and StageFailed if one does not answer.
        """
        number = next(self._requests)
        with self._lost_store_explained():
            self.store.set(f"request/{number}", json.dumps({"command": command, **content}))
            deadline = time.monotonic() + seconds
            for rank in range(1, self.world_size):
                while not self.store.check([f"answer/{number}/{rank}"]):
                    if self.store.check([f"left/{rank}"]):
                        raise StageFailed(self.store.get(f"left/{rank}").decode())
                    self._heartbeat.raise_if_lost()
                    if time.monotonic() > deadline:
                        raise StageFailed(
                            f"rank {rank} of {self.world_size} has not answered for "
                            f"{seconds:.0f} s; its own output, or torchrun's, says why"
                        )
                    time.sleep(SECONDS_BETWEEN_POLLS)
                if problem := self.store.get(f"answer/{number}/{rank}").decode():
                    raise PipelineInvalid(f"rank {rank} {problem}")

    def train(self, folder: Path, parallel: Parallel, on_record: OnRecord) -> str:
        """Run a training of rank 0's on all processes, and return what user code has read."""
        training: dict[str, Any] = {
            "folder": str(folder),
            "processes": parallel.nodes * self.local_world_size,
            "per_process": parallel.ranks_per_node // self.local_world_size,
            # Keys of an earlier attempt are still in the store, which outlives a training.
            "attempt": f"training-{time.time_ns()}",
        }
        self.request("train", **training)
        return self._run_ranks(training, on_record)

    def serve(self, answer: Callable[[dict[str, Any]], str]) -> int:
        """Do what rank 0 requests until it leaves, and return the exit code to leave with.

        ``answer`` takes a request other than a training, and returns why it cannot be met, or "".
        """
        try:
            for number in itertools.count(1):
                # Not `Store.wait`, during which Python could not handle signals.
                while not self.store.check([f"request/{number}"]):
                    self._heartbeat.raise_if_lost()
                    time.sleep(SECONDS_BETWEEN_POLLS)
                request = json.loads(self.store.get(f"request/{number}"))
                is_training, leaves = (request["command"] == name for name in ("train", "leave"))
                problem = "" if is_training or leaves else answer(request)
                self.store.set(f"answer/{number}/{self.rank}", problem)
                if leaves:
                    return int(request["exit_code"])
                if is_training and self.rank < request["processes"]:
                    with suppress(CompressError):  # rank 0 raises it
                        self._run_ranks(request, lambda record: None)
        except torch.distributed.DistNetworkError as error:
            raise StageFailed("rank 0 has ended; its own output says why") from error
        except BaseException as error:
            how = "was stopped"
            if isinstance(error, Exception):
                how = f"failed: {type(error).__name__}: {first_line(error)}"
            with suppress(RuntimeError):  # rank 0 may have ended before
                message = f"rank {self.rank} on {socket.gethostname()} {how}"
                self.store.set(f"left/{self.rank}", message)
            raise
        raise AssertionError

    def leave(self, exit_code: int) -> None:
        """Let all other processes end with rank 0's exit code."""
        with suppress(CompressError, RuntimeError):  # some may have left already
            self.request("leave", SECONDS_TO_LEAVE, exit_code=exit_code)

    def _run_ranks(self, training: Mapping[str, Any], on_record: OnRecord) -> str:
        """Run this process's share of a training's ranks, which the first processes have."""
        # In processes of their own, so that a rank that fails ends no process of the run.
        from compress.training.launch.local_ranks import run_ranks

        folder, per_process = Path(training["folder"]), training["per_process"]
        ranks = LocalRanks(
            first=self.rank * per_process,
            count=per_process,
            world_size=training["processes"] * per_process,
            local_first=self.local_rank * per_process,
            local_world_size=self.local_world_size * per_process,
            host=self.host,
            port=self.port,
            attempt=training["attempt"],
        )
        with self._lost_store_explained():
            return run_ranks(folder, ranks, self.server, on_record, self._heartbeat.raise_if_lost)

    @contextmanager
    def _lost_store_explained(self) -> Iterator[None]:
        try:
            yield
        except torch.distributed.DistNetworkError as error:
            raise StageFailed(
                f"the connection to {self.host}:{self.port}, where the processes meet, is lost; "
                "the output of the process there says why"
            ) from error
