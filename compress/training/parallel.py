"""How the processes of a training share a model: one small class per strategy."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from compress.training.communication import Gradients
from compress.training.optimizer import build_optimizer
from compress.training.resume import copy_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import nn

    from compress.training.resume import Tensors
    from compress.training.settings import Parallel, Training

# An epoch's metric may take long; a dead process is noticed at once, by its closed connection.
PATIENCE = timedelta(hours=24)


class Strategy(Protocol):
    """What the step loop needs to know of the other processes; every rank makes every call."""

    rank: int
    ranks: int

    def wrap(self, module: nn.Module, training: Training) -> nn.Module:
        """Return the module through which gradients are shared; a sharded one changes in place."""
        ...

    def optimizer(self, module: nn.Module, training: Training) -> torch.optim.Optimizer:
        """Return the optimizer of a wrapped module."""
        ...

    def micro_step(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Run one part of a step in a block; gradients are exchanged in the last."""
        ...

    def weights(self, module: nn.Module) -> Tensors:
        """Return the state dict with whole tensors on the CPU; what is not rank 0 may get none."""
        ...

    def load_weights_(self, module: nn.Module, weights: Tensors) -> None:
        """Put whole tensors into the module, in place."""
        ...

    def optimizer_state(
        self, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Return the optimizer's state with whole tensors; only rank 0 may get it."""
        ...

    def load_optimizer_(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Put a whole state into the optimizer, in place."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of numbers over all ranks."""
        ...

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value on rank 0, and None on the others."""
        ...

    def share_buffers_(self, module: nn.Module) -> None:
        """Give every rank rank 0's buffers, in place."""
        ...

    def settle_(self, module: nn.Module) -> None:
        """Let go of what evaluating the module has gathered, in place."""
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
    """One process; also what strategies do that keep the whole model everywhere."""

    rank = 0
    ranks = 1

    def wrap(self, module: nn.Module, training: Training) -> nn.Module:
        """Return the module itself."""
        return module

    def optimizer(self, module: nn.Module, training: Training) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return build_optimizer(module, training)

    def micro_step(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Run a block."""
        return nullcontext()

    def weights(self, module: nn.Module) -> Tensors:
        """Return a copy of the state dict."""
        return copy_of(module.state_dict())

    def load_weights_(self, module: nn.Module, weights: Tensors) -> None:
        """Load the state dict, in place."""
        module.load_state_dict(weights)

    def optimizer_state(
        self, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Return the optimizer's state."""
        return optimizer.state_dict()

    def load_optimizer_(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Load the optimizer's state, in place."""
        optimizer.load_state_dict(state)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the numbers."""
        return list(values)

    def gather(self, value: Any) -> list[Any] | None:
        """Return the one value."""
        return [value]

    def share_buffers_(self, module: nn.Module) -> None:
        """Do nothing."""

    def settle_(self, module: nn.Module) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Return at once."""

    def sent_bytes(self, steps: int) -> int | None:
        """Return None: nothing is sent, or nobody counts."""
        return None

    def remember(self, folder: Path, epoch: int) -> None:
        """Write nothing."""

    def recall(self, folder: Path, epoch: int) -> None:
        """Take up nothing."""


class DataParallel(Alone):
    """Every rank holds the whole model; gradients are averaged (Li et al., 2020)."""

    def __init__(self, parallel: Parallel) -> None:
        """Take part in the process group, which has been joined."""
        self.parallel = parallel
        self.gradients: Gradients | None = None
        self.rank = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.begins_step = True

    def wrap(self, module: nn.Module, training: Training) -> nn.Module:
        """Return the module that averages gradients and sends rank 0's buffers to the others."""
        # Models with a head that the loss does not reach are common (a pooler, say); looking for
        # unused weights in each step costs little beside the step.
        static = self.parallel.static_graph
        wrapped = DistributedDataParallel(
            module,
            bucket_cap_mb=self.parallel.bucket_mebibytes,
            find_unused_parameters=not static,
            static_graph=static,
        )
        self.gradients = Gradients(wrapped, self.parallel)
        return wrapped

    @contextmanager
    def micro_step(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Exchange gradients in the last part of a step; with a static graph also in the first."""
        # A static graph is learnt in the very first backward, which asserts that it exchanges. The
        # first part of each step does, or a resumed training would add up in another order.
        exchange = last or (self.parallel.static_graph and self.begins_step)
        self.begins_step = last
        with nullcontext() if exchange else wrapped.no_sync():  # type: ignore[operator]  # a DistributedDataParallel
            yield

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of numbers over all ranks."""
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return [float(value) for value in sums]

    def gather(self, value: Any) -> list[Any] | None:
        """Return every rank's value on rank 0, and None on the others."""
        values: list[Any] | None = [None] * self.ranks if self.rank == 0 else None
        dist.gather_object(value, values)
        return values

    def share_buffers_(self, module: nn.Module) -> None:
        """Give every rank rank 0's buffers, in place."""
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)

    def wait(self) -> None:
        """Return when every rank has come here."""
        dist.barrier()

    def sent_bytes(self, steps: int) -> int | None:
        """Return the bytes of gradients sent in each of the steps since the last call."""
        return self.gradients.sent_bytes(steps) if self.gradients else None

    def remember(self, folder: Path, epoch: int) -> None:
        """Write what was lost of this process's gradients, and wait for the others."""
        if self.gradients:
            self.gradients.save(folder, epoch)
        self.wait()

    def recall(self, folder: Path, epoch: int) -> None:
        """Take up what was lost of this process's gradients."""
        if self.gradients:
            self.gradients.load(folder, epoch)


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Join the process group that the environment describes for a block, and leave it in peace."""
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    yield  # a rank that failed must not wait here for the others
    dist.destroy_process_group()


def strategy_of(parallel: Parallel) -> Strategy:
    """Return the strategy that the settings name, in a process group that has been joined."""
    if parallel.sharding_mode is not None:
        from compress.training.sharding import Sharded

        return Sharded(parallel)
    if parallel.strategy == "zero1":
        from compress.training.zero import ZeroOne

        return ZeroOne(parallel)
    return DataParallel(parallel)
