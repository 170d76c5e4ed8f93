"""When the garbage collector looks, and at what: libraries are many objects, and all stay.

The CPU cores that a process may use: its affinity, and the quota of its container.
"""

from __future__ import annotations

import gc
import math
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def uncollected() -> Iterator[None]:
    """Let the garbage collector wait: it would look again and again at what an import makes."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def only_new() -> Iterator[None]:
    """Let the garbage collector look, in a block, at what is made there, and not at the rest.

    Each look at all that torch and its exporters are takes a third of a second, and an export has
    several looked. What the block leaves in circles is gone at its end.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        gc.unfreeze()


THREADS = "OMP_NUM_THREADS"
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Return how many cores this process may use, at least one.

    A container with ``--cpus 4``, or a pod with that limit, sees all cores of its machine and is
    stopped for most of the time where it computes with as many threads.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = cpu_quota()
    return max(1, min(allowed or 1, math.ceil(quota) if quota else allowed or 1))


def configured_threads() -> int:
    """Return what `OMP_NUM_THREADS` says, 0 where it says nothing; of a list the first counts."""
    told = os.environ.get(THREADS, "").partition(",")[0].strip()
    return int(told) if told.isdecimal() else 0


def threads_to_use() -> int:
    """Return how many threads were told, or one for each usable core."""
    return configured_threads() or usable_cores()


@contextmanager
def within_quota() -> Iterator[None]:
    """Compute with no more threads in a block than there are usable cores, unless told to."""
    import torch

    before = torch.get_num_threads()
    fewer = min(before, configured_threads() or usable_cores())
    if fewer == before:
        yield
        return
    torch.set_num_threads(fewer)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_quota(own: Path = OWN_CGROUPS, mounted: Path = CGROUPS) -> float | None:
    """Return the cores' worth of time that Linux' control groups leave this process; None if all.

    Args:
        own: the file that names the groups of this process.
        mounted: the folder where groups are told of.
    """
    found = [quota for folder in _folders(own, mounted) if (quota := _quota_in(folder))]
    return min(found, default=None)


def _folders(own: Path, mounted: Path) -> Iterator[Path]:
    """Yield the groups of this process and those around them, by either version of the system."""
    with suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            # The first version has a folder for each set of controllers; the second has one tree,
            # under `unified` where both are there. A container may not see its path, but the root.
            for root in (mounted / controllers, mounted / "cpu") if controllers else (mounted,):
                folder = root / path.strip("/")
                yield folder
                yield from (around for around in folder.parents if around.is_relative_to(root))


def _quota_in(folder: Path) -> float | None:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota = (folder / "cpu.cfs_quota_us").read_text()
        period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    return None
