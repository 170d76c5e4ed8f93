"""Strategy: how the processes of a training share a model; one small class for each way."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from torch import nn
    from torch._C._distributed_c10d import Store

    from compress.artifacts.eager_model import EagerModel
    from compress.data.splits import Batch
    from compress.training.checkpoint.metadata import Tensors
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Training
    from compress.training.loop.train_state import TrainState

# An epoch's metric may take long; a dead process is noticed at once, by its closed connection.
PATIENCE = timedelta(hours=24)


class Strategy(Protocol):
    """What the step loop needs to know of the other processes; every rank makes every call."""

    rank: int
    """Which share of each batch this process computes."""
    ranks: int
    """Shares into which each batch is cut."""
    is_main: bool
    """Whether this process writes and tells what all have in common; one of them does."""
    rng_stream: int
    """Which random numbers this process draws: processes that repeat each other's work share it."""

    def load(self, model: EagerModel, device: str) -> nn.Module:
        """Return the module to train; one that will be sharded may get its weights in `wrap`."""
        ...

    def wrap(
        self, module: nn.Module, training: Training, example: Callable[[], Batch]
    ) -> nn.Module:
        """Return the module through which gradients are shared; a sharded one changes in place.

        Args:
            module: the whole module.
            training: the settings.
            example: gives a few samples, the same in every process.
        """
        ...

    def optimizer(self, module: nn.Module, training: Training) -> torch.optim.Optimizer:
        """Return the optimizer of a wrapped module."""
        ...

    def micro_step(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Run one part of a step in a block; gradients are exchanged in the last."""
        ...

    def backward(self, wrapped: nn.Module, loss: torch.Tensor) -> None:
        """Compute the gradients of one part of a step, and add them up."""
        ...

    def accumulate_gradients(self, learner: TrainState, batches: Sequence[Batch]) -> float:
        """Compute the gradients of a step, in place, and return this rank's mean loss."""
        ...

    def clip_(self, module: nn.Module, largest: float) -> None:
        """Scale all gradients, in place, so that their common norm is not above a limit."""
        ...

    def model_tensors(self, module: nn.Module) -> Tensors:
        """Return this process's part of the weights and buffers."""
        ...

    def load_model_(self, module: nn.Module, tensors: Tensors) -> None:
        """Put what was read of them into the module, in place."""
        ...

    def optimizer_tensors(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
        """Return this process's part of the optimizer's state, named by the weights."""
        ...

    def load_optimizer_(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path
    ) -> None:
        """Put the optimizer's state where a checkpoint left it, in place."""
        ...

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of numbers over all ranks."""
        ...

    def gather(self, value: Any) -> list[Any] | None:
        """Return the value of each share of the batch on the leading process, if not others."""
        ...

    def gather_all(self, value: Any) -> list[Any] | None:
        """Return every process's value on the leading one, and None on the others."""
        ...

    def share(self, value: Any) -> Any:
        """Return the leading process's value."""
        ...

    def share_buffers_(self, module: nn.Module) -> None:
        """Give all copies of the module the first one's buffers, in place."""
        ...

    def release_buffers_(self, module: nn.Module) -> None:
        """Let go of what evaluating the module has gathered, in place."""
        ...

    def wait(self) -> None:
        """Return when every rank has come here."""
        ...

    def sent_bytes(self, steps: int) -> int | None:
        """Return the bytes of gradients sent in each of the steps since the last call."""
        ...

    def sent_between_bytes(self, steps: int) -> int | None:
        """Return those of them that went to another group of processes, where there are groups."""
        ...

    def save_local(self, checkpoint: Path) -> None:
        """Write into a checkpoint what this process alone knows."""
        ...

    def load_local(self, checkpoint: Path) -> None:
        """Take up what this process wrote into a checkpoint."""
        ...


@contextmanager
def process_group(device: str, store: Store | None = None) -> Iterator[None]:
    """Join the process group of the environment's RANK and WORLD_SIZE for a block.

    Args:
        device: with CUDA, gradients are exchanged by NCCL.
        store: through which the ranks meet; by default the one of MASTER_ADDR and MASTER_PORT.
    """
    backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    dist.init_process_group(
        backend, timeout=PATIENCE, store=store, rank=rank, world_size=world_size
    )
    yield  # a rank that failed must not wait here for the others
    dist.destroy_process_group()


def strategy_of(parallel: Parallel) -> Strategy:
    """Return the strategy that the settings name, in a process group that has been joined."""
    from compress.training.distributed.ddp import DDPStrategy

    if parallel.is_mesh:
        from compress.training.distributed.device_mesh import DeviceMeshStrategy

        return DeviceMeshStrategy(parallel)
    if parallel.sharding_mode is not None:
        from compress.training.distributed.fsdp import FSDPStrategy

        return FSDPStrategy(parallel)
    if parallel.strategy == "deepspeed":
        from compress.training.distributed.deepspeed import DeepSpeed

        return DeepSpeed(parallel)
    if parallel.strategy == "zero1":
        from compress.training.distributed.zero1 import Zero1Strategy

        return Zero1Strategy(parallel)
    return DDPStrategy(parallel)
