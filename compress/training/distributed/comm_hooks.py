"""What DDP sends of the gradients: a communication hook for each setting, and its memory.

The lossy averages use error feedback (Seide et al., "1-Bit Stochastic Gradient Descent", 2014):
what was lost of a gradient is added to the next one. The memory is kept by parameter, not by
bucket, and saved by each process, so that a resumed training is exact.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from compress.common.atomic_files import write_atomically
from compress.training.distributed.gradient_compression import (
    GradientCompressor,
    Int8,
    PowerSGD,
    TopK,
    Wire,
)
from compress.training.distributed.hierarchical_allreduce import Hierarchical

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel

    from compress.training.config.parallel import Parallel


class Exchange(Protocol):
    """How the gradients of a bucket become their average over all processes."""

    wire: Wire

    def average(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Return the bucket's averaged buffer, now or later."""
        ...


class Halved:
    """Gradients rounded to 16 bits on their way; nothing is remembered."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.wire = Wire()
        self.dtype = dtype

    def average(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Return the future of an all-reduce that overlaps with the backward pass."""
        buffer = bucket.buffer()
        self.wire.count_mean(buffer.numel(), self.dtype.itemsize)
        if self.dtype == torch.float16:
            return fp16_compress_hook(dist.distributed_c10d._get_default_group(), bucket)
        # torch's own bf16 hook refuses every backend but NCCL.
        rounded = buffer.to(self.dtype).div_(self.wire.ranks)
        work: Any = dist.all_reduce(rounded, async_op=True)
        done: Future[torch.Tensor] = work.get_future().then(lambda _: buffer.copy_(rounded))
        return done


class WithFeedback:
    """A lossy average that adds to each gradient what was lost of the one before it."""

    def __init__(self, lossy: GradientCompressor, module: nn.Module) -> None:
        """Take an algorithm, and the module whose gradients are averaged."""
        self.wire = Wire()
        self.lossy = lossy
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.device = next(module.parameters()).device
        self.lost: dict[str, torch.Tensor] = {}

    def average(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average in place, and return a future that is done."""
        names = [self.names[id(p)] for p in bucket.parameters()]
        buffers = bucket.gradients()
        wanted = [b.float() for b in buffers]
        wanted = [w + self.lost.get(n, 0) for n, w in zip(names, wanted, strict=True)]
        sent, means = self.lossy.average(names, wanted, self.wire)
        self.lost |= {n: w - s for n, w, s in zip(names, wanted, sent, strict=True)}
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean)
        done: Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def save(self, checkpoint: Path) -> None:
        """Write this process's memory into a checkpoint."""
        content = io.BytesIO()
        torch.save({"lost": self.lost, "lossy": self.lossy.state_dict()}, content)
        write_atomically(memory_file(checkpoint), content.getvalue())

    def load(self, checkpoint: Path) -> None:
        """Take up the memory of a checkpoint."""
        file = memory_file(checkpoint)
        if not file.exists():  # the training was communicated otherwise then
            return
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.lost = state["lost"]
        self.lossy.load_state_dict(state["lossy"])


class Gradients:
    """How a model's gradients are averaged, what that sends, and what it remembers."""

    def __init__(self, model: DistributedDataParallel, parallel: Parallel) -> None:
        """Register the hook for a setting; without one DDP's own average stays."""
        self.whole_bytes = whole_bytes(model)
        self.exchange = _exchange(model, parallel)
        if self.exchange is not None:
            # torch refuses annotations that are not evaluated, and a lambda has none.
            model.register_comm_hook(self.exchange, lambda state, bucket: state.average(bucket))

    def sent_bytes(self, steps: int) -> int:
        """Return the bytes that this process sent in each of the steps since the last call."""
        if self.exchange is None:
            return self.whole_bytes
        sent, self.exchange.wire.sent_bytes = self.exchange.wire.sent_bytes, 0
        return sent // steps

    def sent_between_bytes(self, steps: int) -> int | None:
        """Return those of them that went to another group; None where there are no groups."""
        if not isinstance(self.exchange, Hierarchical):
            return None
        wire = self.exchange.wire
        sent, wire.sent_between_bytes = wire.sent_between_bytes, 0
        return sent // steps

    def save(self, checkpoint: Path) -> None:
        """Write this process's memory, where there is one."""
        if isinstance(self.exchange, WithFeedback):
            self.exchange.save(checkpoint)

    def load(self, checkpoint: Path) -> None:
        """Take up this process's memory, where there is one."""
        if isinstance(self.exchange, WithFeedback):
            self.exchange.load(checkpoint)


def memory_file(checkpoint: Path) -> Path:
    """Return where this process keeps its memory."""
    return checkpoint / f"gradients-rank-{dist.get_rank()}.pt"


def whole_bytes(model: DistributedDataParallel) -> int:
    """Return the bytes that a process sends in a step when gradients are averaged whole."""
    wire = Wire()
    for parameter in model.parameters():
        if parameter.requires_grad:
            wire.count_mean(parameter.numel(), parameter.element_size())
    return wire.sent_bytes


def _exchange(model: DistributedDataParallel, parallel: Parallel) -> Exchange | None:
    match parallel.communication:
        case "none":
            return None
        case "fp16":
            return Halved(torch.float16)
        case "bf16":
            return Halved(torch.bfloat16)
        case "powersgd":
            return WithFeedback(PowerSGD(parallel.powersgd_rank), model.module)
        case "topk":
            return WithFeedback(TopK(parallel.topk_fraction), model.module)
        case "int8":
            return WithFeedback(Int8(), model.module)
        case "hierarchical":
            device = next(model.parameters()).device.type
            return Hierarchical(parallel.communication_group, device)
