"""How the processes of a training share a model: one small class per strategy."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from compress.training.communication import Gradients

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from compress.training.settings import Parallel

# Rank 0's evaluation may be long; a dead process is noticed at once, by its closed connection.
PATIENCE = timedelta(hours=24)


class Strategy(Protocol):
    """What the step loop needs to know of the other processes."""

    rank: int
    ranks: int

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module through which gradients are shared."""
        ...

    def mean(self, value: float) -> float:
        """Return the mean of a number over all ranks."""
        ...

    def wait(self) -> None:
        """Return when every rank has come here."""
        ...

    def sent_bytes(self, steps: int) -> int | None:
        """Return the bytes of gradients sent in each of the steps since the last call."""
        ...

    def remember(self, folder: Path, epoch: int) -> None:
        """Write what this process alone knows, before the state after an epoch is written."""
        ...

    def recall(self, folder: Path, epoch: int) -> None:
        """Take up what was written after an epoch."""
        ...


class Alone:
    """One process."""

    rank = 0
    ranks = 1

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module itself."""
        return module

    def mean(self, value: float) -> float:
        """Return the number."""
        return value

    def wait(self) -> None:
        """Return at once."""

    def sent_bytes(self, steps: int) -> int | None:
        """Return None: nothing is sent."""
        return None

    def remember(self, folder: Path, epoch: int) -> None:
        """Write nothing."""

    def recall(self, folder: Path, epoch: int) -> None:
        """Take up nothing."""


class DataParallel:
    """Every rank holds the whole model; gradients are averaged (Li et al., 2020)."""

    def __init__(self, parallel: Parallel) -> None:
        """Join the process group that the environment describes."""
        self.parallel = parallel
        dist.init_process_group("gloo", timeout=PATIENCE)
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module that averages gradients and sends rank 0's buffers to the others."""
        # Models with a head that the loss does not reach are common (a pooler, say); looking for
        # unused weights in each step costs little beside the step.
        wrapped = DistributedDataParallel(module, find_unused_parameters=True)
        self.gradients = Gradients(wrapped, self.parallel)
        return wrapped

    def mean(self, value: float) -> float:
        """Return the mean of a number over all ranks."""
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.ranks

    def wait(self) -> None:
        """Return when every rank has come here."""
        dist.barrier()

    def sent_bytes(self, steps: int) -> int | None:
        """Return the bytes of gradients sent in each of the steps since the last call."""
        return self.gradients.sent_bytes(steps)

    def remember(self, folder: Path, epoch: int) -> None:
        """Write what was lost of this process's gradients, and wait for the others."""
        self.gradients.save(folder, epoch)
        self.wait()

    def recall(self, folder: Path, epoch: int) -> None:
        """Take up what was lost of this process's gradients."""
        self.gradients.load(folder, epoch)

    def leave(self) -> None:
        """Leave the process group, after the last exchange."""
        dist.destroy_process_group()
