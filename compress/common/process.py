"""State of this process: random seeds, CPU threads, the garbage collector; others like it."""

# torch and NumPy are imported inside the functions, because the command line imports this module.

from __future__ import annotations

import ctypes
import gc
import hashlib
import importlib
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.common.errors import PipelineInvalid, first_line
from compress.common.lazy_modules import np, torch

if TYPE_CHECKING:
    import signal
    from multiprocessing.process import BaseProcess
    from socket import socket

THREADS = "OMP_NUM_THREADS"
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def start_module(module: str, passed: socket, **settings: str) -> subprocess.Popen[bytes]:
    """Start a module as a program that finds what this process does, by `sys.path`.

    Its argument is the number of the `passed` socket; `settings` are environment variables.
    """
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    return subprocess.Popen(
        # -P: the working directory may hold anybody's files.
        [sys.executable, "-P", "-m", module, str(passed.fileno())],
        env={**os.environ, **settings, "PYTHONPATH": path},
        pass_fds=[passed.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def end_processes(processes: Iterable[BaseProcess], seconds: float) -> None:
    """End processes by SIGTERM, and by SIGKILL those that have not ended after so many seconds."""
    processes = [*processes]
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()  # does nothing where it has ended
        process.join()


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when its parent ends, even if that is killed."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux alone has it
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(number))


def derive_seed(*parts: int) -> int:
    """Return 32 bits that differ for different numbers."""
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little")


@contextmanager
def seeded(seed: int, device: str) -> Iterator[None]:
    """Seed torch, NumPy and ``random`` for a block, and restore their states after it."""
    with random_state_kept(device):
        reseed(seed, device)
        yield


def random_states() -> list[Any]:
    """Return the states of the generators of ``random``, NumPy and torch on the CPU."""
    return [random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()]


@contextmanager
def random_state_kept(device: str) -> Iterator[None]:
    """Restore the states of torch, NumPy and ``random`` after a block."""
    python_state, numpy_state, _ = random_states()
    try:
        devices = [torch.device(device)] if device.startswith("cuda") else []
    except RuntimeError as error:
        raise PipelineInvalid(f"device: {first_line(error)}") from error
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def reseed(seed: int, device: str) -> None:
    """Seed torch, NumPy and ``random``."""
    # torch.manual_seed seeds all devices of all kinds, which takes longer than a small step.
    torch.default_generator.manual_seed(seed)
    if device.startswith("cuda"):
        torch.cuda.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable the garbage collector for a block, such as an import that makes many objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_modules(names: Iterable[str]) -> None:
    """Import modules ahead of their use; those that cannot be imported are left out."""
    with gc_disabled():
        for name in names:
            with suppress(Exception, SystemExit):
                importlib.import_module(name)


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exempt existing objects from garbage collection for a block; collect its own at the end."""
    # A collection over all objects of torch takes a third of a second, an export triggers several.
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


def usable_cores() -> int:
    """Return how many cores this process may use, at least one."""
    # A container with ``--cpus 4``, or a pod with that limit, sees all cores of its machine, and
    # the kernel throttles it for most of the time if it computes with as many threads.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota()
    return max(1, min(allowed or 1, math.ceil(quota) if quota else allowed or 1))


def configured_threads() -> int:
    """Return the number in `OMP_NUM_THREADS`, the first one of a list; 0 where it is not set."""
    first = os.environ.get(THREADS, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def threads_to_use() -> int:
    """Return the number in `OMP_NUM_THREADS`, else one thread for each usable core."""
    return configured_threads() or usable_cores()


def within_quota() -> AbstractContextManager[None]:
    """Limit torch to the usable cores, or to `OMP_NUM_THREADS`, for a block."""
    if "torch" not in sys.modules and cpu_quota() is None:
        # It will use no more by itself, and a run of cached results does not need it.
        return nullcontext()
    return torch_threads(min(torch.get_num_threads(), threads_to_use()))


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Let torch compute with a number of CPU threads in a block, and after it with the former."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_quota(
    own: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Return this process's CPU quota in cores, the least of its cgroups'; None without one."""
    # Not ``loky.cpu_count``, which reads the root of the mount alone: it misses the quota of a
    # systemd slice, of a Slurm job and of every group around a container's own.
    quotas: list[float] = []
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            # v1 has a folder for each set of controllers, v2 a single tree. A container may see the
            # root of its group alone, whatever path the kernel names.
            for root in (mounted / controllers, mounted / "cpu") if controllers else (mounted,):
                folder = root / path.strip("/")
                groups = [folder, *(g for g in folder.parents if g.is_relative_to(root))]
                quotas += filter(None, map(_quota_in, groups))
    return min(quotas, default=None)


def _quota_in(folder: Path) -> float | None:
    """Return a cgroup's CPU quota in cores; None where it has none."""
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota = (folder / "cpu.cfs_quota_us").read_text()
        period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    return None
