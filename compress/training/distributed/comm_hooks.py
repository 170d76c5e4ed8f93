"""DDP communication hooks: how gradients are averaged, one for each setting of `communication`.

Lossy compression uses error feedback (Seide et al., "1-Bit Stochastic Gradient Descent", 2014): the
residual, which compression drops from a gradient, is added to the next gradient.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.futures import Future

from compress.common.atomic_files import write_atomically
from compress.training.distributed.gradient_compression import (
    CommCounter,
    GradientCompressor,
    Int8,
    PowerSGD,
    TopK,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path
    from typing import TypeAlias

    from torch import nn
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
    from torch.nn.parallel import DistributedDataParallel

    from compress.training.config.parallel import Parallel

    Exchange: TypeAlias = Generator[Any, None, tuple[Any, Callable[[], torch.Tensor]]]
    """Yields the work of each collective of a bucket but the last, and goes on when that is done.
    Returns the last one's work, and what then computes the averaged bucket."""


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
        done: Future[torch.Tensor] = work.get_future().then(
            lambda reduced: buffer.copy_(reduced.value()[0])
        )
        return done


class PendingAverage:
    """A bucket that is being averaged."""

    def __init__(self, exchange: Exchange, device: torch.device) -> None:
        self.exchange = exchange
        self.work: Any = None
        self.finish: Callable[[], torch.Tensor] | None = None
        devices: list[int | str | torch.device] | None = None if device.type == "cpu" else [device]
        self.last_done: Future[None] = Future(devices=devices)
        self.average: Future[torch.Tensor] = self.last_done.then(self._finish)
        """The averaged bucket, or the error of a collective."""

    def advance(self) -> bool:
        """Start the next collective once the previous one is done; False if it is the last."""
        if self.work is not None:
            self.work.wait()
        try:
            self.work = next(self.exchange)
        except StopIteration as ended:
            self.work, self.finish = ended.value
            self.work.get_future().then(lambda _: self.last_done.set_result(None))
            return False
        return True

    def _finish(self, _: Future[None]) -> torch.Tensor:
        self.work.get_future().wait()  # raises where the collective has failed
        assert self.finish is not None
        return self.finish()


class OverlappedAverage(ABC):
    """Averages buckets by several collectives each, beside the backward pass.

    gloo matches collectives by the order in which each process starts them, so that none may start
    in a callback, when another one happens to end. The next one of each bucket starts when DDP
    brings a further bucket, which all processes do in the same order.
    """

    def __init__(self) -> None:
        self.comm = CommCounter()
        self.pending: list[PendingAverage] = []

    @abstractmethod
    def exchange(self, bucket: GradBucket) -> Exchange:
        """Start to average a bucket in place."""

    def average(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Return the future of the averaged bucket."""
        new = PendingAverage(self.exchange(bucket), bucket.buffer().device)
        # The new one first: it need not wait for any other collective.
        pending = [new, *self.pending]
        self.pending = [each for each in pending if each.advance()]
        while bucket.is_last() and self.pending:
            self.pending = [each for each in self.pending if each.advance()]
        return new.average


class ErrorFeedback(OverlappedAverage):
    """Compressed average that adds to each gradient the residual of the one before."""

    def __init__(self, compressor: GradientCompressor, module: nn.Module) -> None:
        super().__init__()
        self.compressor = compressor
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.device = next(module.parameters()).device
        # By parameter, because DDP may rebuild its buckets. Every process saves its own, so that a
        # resumed training is exact.
        self.residuals: dict[str, torch.Tensor] = {}

    def exchange(self, bucket: GradBucket) -> Exchange:
        """Start to average a bucket in place."""
        names = [self.names[id(p)] for p in bucket.parameters()]
        buffer, gradients = bucket.buffer(), bucket.gradients()
        exact = [
            gradient.float() + self.residuals.get(name, 0)
            for name, gradient in zip(names, gradients, strict=True)
        ]
        last = yield from self.compressor.exchange(names, exact, self.comm)
        self.residuals |= {n: e - s for n, e, s in zip(names, exact, last.sent, strict=True)}

        def finish() -> torch.Tensor:
            for gradient, mean in zip(gradients, last.means(), strict=True):
                gradient.copy_(mean)
            return buffer

        return last.work, finish

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


class HierarchicalAllReduce(OverlappedAverage):
    """Gradients are averaged within groups of processes first, then between groups.

    After Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision" (2018),
    section 3.3. The result differs from one all-reduce only by the order of summation.
    """

    def __init__(self, group_processes: int, device: str) -> None:
        """Form groups of consecutive ranks, which torchrun places on the same node."""
        super().__init__()
        shape = (self.comm.ranks // group_processes, group_processes)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("between", "within"))
        self.within, self.between = mesh.get_group("within"), mesh.get_group("between")
        self.groups, self.group_processes = shape

    def exchange(self, bucket: GradBucket) -> Exchange:
        """Start to average a bucket in place."""
        buffer = bucket.buffer()
        padded_N = F.pad(buffer, (0, -buffer.numel() % self.group_processes))
        shard_S = padded_N.new_empty(padded_N.numel() // self.group_processes)
        self.comm.count_reduce_scatter(shard_S, self.group_processes)
        self.comm.sent_between_bytes += self.comm.count_all_reduce(
            shard_S.numel(), shard_S.element_size(), self.groups
        )
        self.comm.count_all_gather(shard_S, self.group_processes)
        # Each of the g processes of a group gets the sum of one g-th within the group,
        yield dist.reduce_scatter_tensor(shard_S, padded_N, group=self.within, async_op=True)
        # completes it with the processes at the same position of other groups,
        yield dist.all_reduce(shard_S, group=self.between, async_op=True)
        # and sends it to its group.
        shard_S.div_(self.comm.ranks)
        gathering: Any = dist.all_gather_into_tensor(
            padded_N, shard_S, group=self.within, async_op=True
        )
        return gathering, lambda: buffer.copy_(padded_N[: buffer.numel()])


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
                self.hook = ErrorFeedback(Int8(parallel.int8_rounding), model.module)
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
