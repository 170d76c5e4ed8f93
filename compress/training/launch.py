"""Several training processes on this machine, under torchrun's elastic agent."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from compress.core.errors import StageFailed, Unavailable
from compress.training.failure import (
    forget_failure,
    is_lost_peer,
    read_failure,
    record_failure,
)
from compress.training.journal import append_epoch, following
from compress.training.loop import Job, train
from compress.training.parallel import process_group, strategy_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compress.training.resume import Epoch

# SIGINT is left to Python, so that it is a KeyboardInterrupt here as everywhere.
SIGNALS = ("SIGTERM", "SIGHUP", "SIGQUIT")
SECONDS_FOR_THE_CULPRIT = 5
SECONDS_TO_END = 5


def train_on_ranks(job: Job, tell: Callable[[Epoch], None]) -> None:
    """Train on several processes, and return when all of them have ended.

    Args:
        job: what to train; it is pickled.
        tell: called in this process, from a thread, after each epoch.

    Raises:
        StageFailed: a rank failed (with that rank's own words), or the job cannot be pickled.
        CompressError: a rank raised that leaf.
    """
    luggage = _pickled(job)
    forget_failure(job.folder)
    launch = elastic_launch(_config(job), _rank)
    try:
        with ExitStack() as stack:
            for surroundings in (
                _quiet(),
                _own_signals(),
                _own_rendezvous_store(),
                following(job.folder, tell),
                _ranks_deaf_to_ctrl_c(),
            ):
                stack.enter_context(surroundings)
            launch(luggage, str(job.folder))
    except ChildFailedError as error:
        rank, failed = error.get_first_failure()
        raise read_failure(job.folder, rank, failed.exitcode) from None
    except SignalException as error:
        # The ranks are gone. A handler of the caller's comes first; else the interpreter exits in
        # order, so that nothing half-written is left, with the shell's code for the signal.
        if callable(signal.getsignal(error.sigval)):
            signal.raise_signal(error.sigval)
        raise SystemExit(128 + error.sigval) from None


def _config(job: Job) -> LaunchConfig:
    logs = job.folder / "logs"
    logs.mkdir(exist_ok=True)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=job.training.parallel.ranks,
        run_id=job.folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="spawn",
        signals_to_handle=",".join(SIGNALS),
        shutdown_timeout=SECONDS_TO_END,
        # Ranks are silent: what libraries and the user's code write is kept beside the state.
        logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )


def _rank(luggage: bytes, folder: str) -> None:
    """Run one rank; the elastic agent calls this in a process of its own."""
    # Ctrl-C reaches the whole terminal: end without a traceback, the parent tells the story.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    place, rank = Path(folder), int(os.environ["RANK"])
    try:
        job: Job = pickle.loads(luggage)
        job = replace(job, device=_own_device(job.device))
        with process_group(job.device):
            train(job, strategy_of(job.training.parallel), partial(append_epoch, place))
    except Exception as error:
        if is_lost_peer(error):
            time.sleep(SECONDS_FOR_THE_CULPRIT)  # the agent ends this rank, and names the other one
        record_failure(place, rank, error)
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


def _pickled(job: Job) -> bytes:
    try:
        return pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise StageFailed(
            f"the data cannot be sent to {job.training.parallel.ranks} processes ({error}); "
            "name it by a data factory, or set parallel.processes to 1"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """End the elastic agent's logging at its own root: it warns of each process that it ends."""
    root, nowhere = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    propagated = root.propagate
    root.addHandler(nowhere)
    root.propagate = False
    try:
        yield
    finally:
        root.propagate = propagated
        root.removeHandler(nowhere)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Put back the signal handlers, which the elastic agent replaces and leaves replaced."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {name: signal.getsignal(getattr(signal, name)) for name in SIGNALS}
    try:
        yield
    finally:
        for name, handler in handlers.items():
            signal.signal(getattr(signal, name), handler)


@contextmanager
def _ranks_deaf_to_ctrl_c() -> Iterator[None]:
    """Keep a Ctrl-C from ranks that are still importing, which would each print a traceback.

    Processes inherit the mask of the thread that starts them. Here, a thread started before takes
    the signal, and Python raises KeyboardInterrupt in the main thread as ever.
    """
    resource_tracker.ensure_running()  # or it would be started below, and lift the mask
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextmanager
def _own_rendezvous_store() -> Iterator[None]:
    """Give each round a store of its own (a shared one hangs restarts: pytorch issue 135712)."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    previous = {key: os.environ.get(key) for key in (name, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ[name] = "1"
    try:
        yield
    finally:
        for key, value in previous.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
