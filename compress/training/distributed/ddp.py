"""Strategies that keep the whole model in every process."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from compress.training.checkpoint.state_dict import (
    load_model_,
    load_optimizer_,
    model_tensors,
    optimizer_tensors,
)
from compress.training.distributed.comm_hooks import Gradients
from compress.training.optim.clip_grad import clip_norm_
from compress.training.optim.compile import compile_
from compress.training.optim.optimizer import build_optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import nn

    from compress.artifacts.eager_model import EagerModel
    from compress.data.splits import Batch
    from compress.training.checkpoint.metadata import Tensors
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Training
    from compress.training.loop.train_state import TrainState


class SingleProcess:
    """One process; also what strategies do that keep the whole model everywhere."""

    rank = 0
    ranks = 1
    is_main = True
    rng_stream = 0

    def load(self, model: EagerModel, device: str) -> nn.Module:
        """Return the module with its weights."""
        return model.load(device)

    def wrap(
        self, module: nn.Module, training: Training, example: Callable[[], Batch]
    ) -> nn.Module:
        """Return the module itself."""
        compile_(module, training)
        return module

    def optimizer(self, module: nn.Module, training: Training) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return build_optimizer(module, training)

    def micro_step(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[None]:
        """Run a block."""
        return nullcontext()

    def backward(self, wrapped: nn.Module, loss: torch.Tensor) -> None:
        """Add up gradients."""
        torch.autograd.backward(loss)

    def accumulate_gradients(self, learner: TrainState, batches: Sequence[Batch]) -> float:
        """Compute one part of the step after the other."""
        return learner.accumulate_gradients(batches)

    def clip_(self, module: nn.Module, largest: float) -> None:
        """Scale all gradients, in place, so that their common norm is not above a limit."""
        clip_norm_(module.parameters(), largest)

    def model_tensors(self, module: nn.Module) -> Tensors:
        """Return the weights and buffers, or the part of them that lies here."""
        return model_tensors(module)

    def load_model_(self, module: nn.Module, tensors: Tensors) -> None:
        """Put what was read of them into the module, in place."""
        load_model_(module, tensors)

    def optimizer_tensors(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
        """Return the optimizer's state, or the part of it that lies here."""
        return optimizer_tensors(module, optimizer)

    def load_optimizer_(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path
    ) -> None:
        """Read the same part of a checkpoint, in place."""
        load_optimizer_(module, optimizer, checkpoint)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the numbers."""
        return list(values)

    def gather(self, value: Any) -> list[Any] | None:
        """Return the one value."""
        return [value]

    def gather_all(self, value: Any) -> list[Any] | None:
        """Return the one value."""
        return [value]

    def share(self, value: Any) -> Any:
        """Return the value."""
        return value

    def share_buffers_(self, module: nn.Module) -> None:
        """Do nothing."""

    def release_buffers_(self, module: nn.Module) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Return at once."""

    def sent_bytes(self, steps: int) -> int | None:
        """Return None: nothing is sent, or nobody counts."""
        return None

    def sent_between_bytes(self, steps: int) -> int | None:
        """Return None: there are no groups of processes."""
        return None

    def save_local(self, checkpoint: Path) -> None:
        """Write nothing."""

    def load_local(self, checkpoint: Path) -> None:
        """Take up nothing."""


class DDPStrategy(SingleProcess):
    """Every rank holds the whole model; gradients are averaged (Li et al., 2020)."""

    def __init__(self, parallel: Parallel) -> None:
        """Take part in the process group, which has been joined."""
        self.parallel = parallel
        self.gradients: Gradients | None = None
        self.rank = self.rng_stream = dist.get_rank()
        self.ranks = dist.get_world_size()
        self.is_main = self.rank == 0
        self.begins_step = True

    def wrap(
        self, module: nn.Module, training: Training, example: Callable[[], Batch]
    ) -> nn.Module:
        """Return the module that averages gradients and hands on the first one's buffers."""
        # Models with a head that the loss does not reach are common (a pooler, say); looking for
        # unused weights in each step costs little beside the step.
        compile_(module, training)
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
        """Return every process's value on the leading one, and None on the others."""
        return self.gather_all(value)

    def gather_all(self, value: Any) -> list[Any] | None:
        """Return every process's value on the leading one, and None on the others."""
        values: list[Any] | None = [None] * dist.get_world_size() if self.is_main else None
        dist.gather_object(value, values)
        return values

    def share(self, value: Any) -> Any:
        """Return the leading process's value."""
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def share_buffers_(self, module: nn.Module) -> None:
        """Give every process the leading one's buffers, in place."""
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)

    def wait(self) -> None:
        """Return when every rank has come here."""
        dist.barrier()

    def sent_bytes(self, steps: int) -> int | None:
        """Return the bytes of gradients sent in each of the steps since the last call."""
        return self.gradients.sent_bytes(steps) if self.gradients else None

    def sent_between_bytes(self, steps: int) -> int | None:
        """Return those of them that went to another group of processes, where there are groups."""
        return self.gradients.sent_between_bytes(steps) if self.gradients else None

    def save_local(self, checkpoint: Path) -> None:
        """Write what was lost of this process's gradients."""
        if self.gradients:
            self.gradients.save(checkpoint)

    def load_local(self, checkpoint: Path) -> None:
        """Take up what was lost of this process's gradients."""
        if self.gradients:
            self.gradients.load(checkpoint)
