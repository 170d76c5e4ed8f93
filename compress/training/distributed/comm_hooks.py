"""DDP communication hooks: how gradients are averaged, one for each setting of `communication`.

Lossy compression uses error feedback (Seide et al., "1-Bit Stochastic Gradient Descent", 2014): the
residual, which compression drops from a gradient, is added to the next gradient.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh

from compress.common.atomic_files import write_atomically
from compress.training.distributed.gradient_compression import (
    CommCounter,
    GradientCompressor,
    Int8,
    PowerSGD,
    TopK,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
    from torch.futures import Future
    from torch.nn.parallel import DistributedDataParallel

    from compress.training.config.parallel import Parallel


class HalfPrecisionAverage:
    """Gradients are sent in 16 bits; there is no residual."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.comm = CommCounter()
        self.dtype = dtype

    def average(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Return the future of the averaged bucket, by an all-reduce beside the backward pass."""
        buffer = bucket.buffer()
        self.comm.count_all_reduce(buffer.numel(), self.dtype.itemsize)
        if self.dtype == torch.float16:
            return fp16_compress_hook(dist.distributed_c10d._get_default_group(), bucket)
        # torch's own bf16 hook refuses every backend but NCCL.
        rounded = buffer.to(self.dtype).div_(self.comm.ranks)
        work: Any = dist.all_reduce(rounded, async_op=True)
        done: Future[torch.Tensor] = work.get_future().then(lambda _: buffer.copy_(rounded))
        return done


class ErrorFeedback:
    """Compressed average that adds to each gradient the residual of the one before."""

    def __init__(self, compressor: GradientCompressor, module: nn.Module) -> None:
        self.comm = CommCounter()
        self.compressor = compressor
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.device = next(module.parameters()).device
        # By parameter, because DDP may rebuild its buckets. Every process saves its own, so that a
        # resumed training is exact.
        self.residuals: dict[str, torch.Tensor] = {}

    def average(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average in place, and return a completed future."""
        names = [self.names[id(p)] for p in bucket.parameters()]
        buffers = bucket.gradients()
        exact = [
            buffer.float() + self.residuals.get(name, 0)
            for name, buffer in zip(names, buffers, strict=True)
        ]
        sent, means = self.compressor.average(names, exact, self.comm)
        self.residuals |= {n: e - s for n, e, s in zip(names, exact, sent, strict=True)}
        for buffer, mean in zip(buffers, means, strict=True):
            buffer.copy_(mean)
        done: Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def save(self, checkpoint: Path) -> None:
        """Write this process's residuals into a checkpoint."""
        # The keys are those of checkpoints already written.
        content = io.BytesIO()
        torch.save({"lost": self.residuals, "lossy": self.compressor.state_dict()}, content)
        write_atomically(residuals_file(checkpoint), content.getvalue())

    def load(self, checkpoint: Path) -> None:
        """Load this process's residuals from a checkpoint, if it has them."""
        file = residuals_file(checkpoint)
        if not file.exists():  # written with another setting of `communication`
            return
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.residuals = state["lost"]
        self.compressor.load_state_dict(state["lossy"])


class HierarchicalAllReduce:
    """Gradients are averaged within groups of processes first, then between groups.

    After Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision" (2018),
    section 3.3. The result differs from one all-reduce only by the order of summation.
    """

    def __init__(self, group_processes: int, device: str) -> None:
        """Form groups of consecutive ranks, which torchrun places on the same node."""
        self.comm = CommCounter()
        shape = (self.comm.ranks // group_processes, group_processes)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("between", "within"))
        self.within, self.between = mesh.get_group("within"), mesh.get_group("between")
        self.groups, self.group_processes = shape

    def average(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average in place, and return a completed future."""
        buffer = bucket.buffer()
        padded_N = F.pad(buffer, (0, -buffer.numel() % self.group_processes))
        shard_S = padded_N.new_empty(padded_N.numel() // self.group_processes)
        # Each of the g processes of a group gets the sum of one g-th within the group,
        dist.reduce_scatter_tensor(shard_S, padded_N, group=self.within)
        # completes it with the processes at the same position of other groups,
        dist.all_reduce(shard_S, group=self.between)
        # and sends it to its group.
        dist.all_gather_into_tensor(padded_N, shard_S.div_(self.comm.ranks), group=self.within)
        buffer.copy_(padded_N[: buffer.numel()])
        self.comm.count_reduce_scatter(shard_S, self.group_processes)
        self.comm.sent_between_bytes += self.comm.count_all_reduce(
            shard_S.numel(), shard_S.element_size(), self.groups
        )
        self.comm.count_all_gather(shard_S, self.group_processes)
        done: Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done


class GradientCommunication:
    """The communication hook of a DDP model, the bytes that it sends, and its residuals."""

    def __init__(self, model: DistributedDataParallel, parallel: Parallel) -> None:
        """Register the hook that the settings name; `none` leaves DDP's own all-reduce."""
        uncompressed = CommCounter()
        for parameter in model.parameters():
            if parameter.requires_grad:
                uncompressed.count_all_reduce(parameter.numel(), parameter.element_size())
        self.uncompressed_bytes = uncompressed.sent_bytes
        self.hook: HalfPrecisionAverage | ErrorFeedback | HierarchicalAllReduce | None
        match parallel.communication:
            case "none":
                self.hook = None
                return
            case "fp16":
                self.hook = HalfPrecisionAverage(torch.float16)
            case "bf16":
                self.hook = HalfPrecisionAverage(torch.bfloat16)
            case "powersgd":
                self.hook = ErrorFeedback(PowerSGD(parallel.powersgd_rank), model.module)
            case "topk":
                self.hook = ErrorFeedback(TopK(parallel.topk_fraction), model.module)
            case "int8":
                self.hook = ErrorFeedback(Int8(), model.module)
            case "hierarchical":
                device = next(model.parameters()).device.type
                self.hook = HierarchicalAllReduce(parallel.communication_group, device)
        # A lambda, because torch checks the hook's annotations and rejects postponed ones.
        model.register_comm_hook(self.hook, lambda state, bucket: state.average(bucket))

    def sent_bytes(self, steps: int) -> int:
        """Return the bytes that this process sent per step since the last call."""
        return self.hook.comm.per_step(steps) if self.hook else self.uncompressed_bytes

    def sent_between_bytes(self, steps: int) -> int | None:
        """Return how many of them left the process's group; None without groups."""
        if not isinstance(self.hook, HierarchicalAllReduce):
            return None
        comm = self.hook.comm
        sent, comm.sent_between_bytes = comm.sent_between_bytes, 0
        return sent // steps

    def save(self, checkpoint: Path) -> None:
        """Write this process's residuals, if the hook has any."""
        if isinstance(self.hook, ErrorFeedback):
            self.hook.save(checkpoint)

    def load(self, checkpoint: Path) -> None:
        """Load this process's residuals, if the hook has any."""
        if isinstance(self.hook, ErrorFeedback):
            self.hook.load(checkpoint)


def residuals_file(checkpoint: Path) -> Path:
    """Return the file of this process's residuals."""
    return checkpoint / f"gradients-rank-{dist.get_rank()}.pt"
