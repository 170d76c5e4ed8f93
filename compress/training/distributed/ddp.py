"""Data parallelism: every process holds the whole model and a share of each batch."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from compress.training.distributed.base import Strategy
from compress.training.distributed.comm_hooks import GradientCommunication
from compress.training.optim.compile import compile_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import nn

    from compress.data.batch import Batch
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Training


class DDPStrategy(Strategy):
    """DistributedDataParallel: gradients are averaged (Li et al., "PyTorch Distributed", 2020)."""

    def __init__(self, parallel: Parallel) -> None:
        """Read rank and world size of the process group, which must have been joined."""
        self.parallel = parallel
        self.gradients: GradientCommunication | None = None
        self.rank = self.rng_stream = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.is_main = self.rank == 0
        self.is_first_micro_batch = True

    def wrap(
        self, module: nn.Module, training: Training, example: Callable[[], Batch]
    ) -> nn.Module:
        """Wrap the module in DistributedDataParallel, which also broadcasts rank 0's buffers."""
        compile_(module, training)
        # Models with a head that the loss does not reach are common (a pooler, say); looking for
        # unused weights in each step costs little beside the step.
        static = self.parallel.static_graph
        wrapped = DistributedDataParallel(
            module,
            bucket_cap_mb=self.parallel.bucket_mebibytes,
            find_unused_parameters=not static,
            static_graph=static,
        )
        self.gradients = GradientCommunication(wrapped, self.parallel)
        return wrapped

    @contextmanager
    def gradient_sync(self, wrapped: nn.Module, is_last: bool) -> Iterator[None]:
        """All-reduce gradients in the last micro-batch; with a static graph also in the first."""
        # DDP learns a static graph in the very first backward, and asserts that it all-reduces
        # there. Then so does the first of each step, or a resumed training would add up the
        # gradients in another order.
        exchange = is_last or (self.parallel.static_graph and self.is_first_micro_batch)
        self.is_first_micro_batch = is_last
        with nullcontext() if exchange else wrapped.no_sync():  # type: ignore[operator]  # a DistributedDataParallel
            yield

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Sum each number over all ranks."""
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return [float(value) for value in sums]

    def gather_shares(self, value: Any) -> list[Any] | None:
        """Gather every process's value on rank 0."""
        return self.gather_all(value)

    def gather_all(self, value: Any) -> list[Any] | None:
        """Gather every process's value on rank 0; the others get None."""
        values: list[Any] | None = [None] * dist.get_world_size() if self.is_main else None
        dist.gather_object(value, values)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value."""
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def broadcast_buffers_(self, module: nn.Module) -> None:
        """Overwrite the buffers of every process by rank 0's."""
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        dist.barrier()

    def sent_bytes(self, steps: int) -> int | None:
        """Return the bytes of gradients sent per step since the last call."""
        return self.gradients.sent_bytes(steps) if self.gradients else None

    def sent_between_bytes(self, steps: int) -> int | None:
        """Return how many of them left the process's group; None without groups."""
        return self.gradients.sent_between_bytes(steps) if self.gradients else None

    def save_local(self, checkpoint: Path) -> None:
        """Write this process's residuals of compressed gradients."""
        if self.gradients:
            self.gradients.save(checkpoint)

    def load_local(self, checkpoint: Path) -> None:
        """Load this process's residuals of compressed gradients."""
        if self.gradients:
            self.gradients.load(checkpoint)
