"""Gradients between processes of DDP: hooks that exchange them, and how they are compressed."""

from __future__ import annotations

import io
import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import _compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.futures import Future

from compress.common.atomic_files import write_atomically
from compress.common.process import derive_seed

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
    from torch.nn.parallel import DistributedDataParallel

    from compress.training.config.parallel import Parallel

    Exchange: TypeAlias = Generator[Any, None, tuple[Any, Callable[[], torch.Tensor]]]
    """Yields the work of each collective of a bucket but the last, and goes on when that is done.
    Returns the last one's work, and what then computes the averaged bucket."""
    Compressed: TypeAlias = Generator[
        Any, None, tuple[Any, list[torch.Tensor], Callable[[], list[torch.Tensor]]]
    ]
    """Yields as `Exchange`. Returns the last work, what this process's gradients are after
    compression, and what then computes the averages over all ranks, in any thread."""


class Communication:
    """Counts the bytes that this process sends in collectives, and runs some of them.

    Subclasses are hooks of DDP: their ``average`` exchanges the gradients of a bucket.
    """

    def __init__(self) -> None:
        self.ranks = dist.get_world_size()
        self.sent = 0

    def count_all_reduce(self, elements: int, bytes_each: int, ranks: int | None = None) -> int:
        """Count an all-reduce that other code runs, and return its bytes."""
        # As in a ring, the minimum for any all-reduce; gloo's are rings, NCCL chooses for itself.
        ranks = ranks or self.ranks
        sent = 2 * (ranks - 1) * elements * bytes_each // ranks
        self.sent += sent
        return sent

    def count_all_gather(self, shard: torch.Tensor, ranks: int) -> None:
        """Count a ring that gathers such a shard of each process."""
        self.sent += (ranks - 1) * shard.nbytes

    def count_reduce_scatter(self, shard: torch.Tensor, ranks: int) -> None:
        """Count a ring after which each process has the sum of such a shard."""
        # Gloo, which main memory is for, all-reduces the whole and drops the rest (torch 2.13).
        self.sent += (2 if shard.is_cpu else 1) * (ranks - 1) * shard.nbytes

    def start_gather(
        self, *vectors_N: torch.Tensor
    ) -> tuple[Any, Callable[[], list[list[torch.Tensor]]]]:
        """Start to gather some vectors, those of larger elements first, by one collective.

        Returns its work, and a function for when that is done, which gives each process's vectors.
        """
        sizes = [vector_N.nbytes for vector_N in vectors_N]
        packed = torch.cat([vector_N.view(torch.uint8) for vector_N in vectors_N])
        self.count_all_gather(packed, self.ranks)
        gathered = [torch.empty_like(packed) for _ in range(self.ranks)]
        work: Any = dist.all_gather(gathered, packed, async_op=True)

        def unpack() -> list[list[torch.Tensor]]:
            return [
                [
                    part.view(vector_N.dtype)
                    for part, vector_N in zip(torch.split(theirs, sizes), vectors_N, strict=True)
                ]
                for theirs in gathered
            ]

        return work, unpack

    def start_mean_(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Callable[[], None]]:
        """Start to average tensors over all processes, by one all-reduce.

        Returns its work, and a function for when that is done, which writes the means in place.
        """
        flat_N = torch.cat([t.flatten() for t in tensors])
        self.count_all_reduce(flat_N.numel(), flat_N.element_size())
        work: Any = dist.all_reduce(flat_N, async_op=True)

        def write() -> None:
            means = shaped_like(tensors, flat_N.div_(self.ranks))
            for tensor, mean in zip(tensors, means, strict=True):
                tensor.copy_(mean)

        return work, write

    def sent_bytes(self, steps: int) -> int:
        """Return the bytes that this process sent per step since the last call."""
        sent, self.sent = self.sent, 0
        return sent // steps

    def sent_between_bytes(self, steps: int) -> int | None:
        """Return how many of them left the process's group; None without groups."""
        return None

    def save(self, checkpoint: Path) -> None:
        """Write what this process alone has into a checkpoint, such as residuals."""

    def load(self, checkpoint: Path) -> None:
        """Load what this process wrote by `save`."""


def shaped_like(tensors: Sequence[torch.Tensor], flat_N: torch.Tensor) -> list[torch.Tensor]:
    """Split a flat tensor into tensors of the given shapes."""
    parts = torch.split(flat_N, [t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


class DefaultAllReduce(Communication):
    """DDP's own average, whose bytes are known beforehand."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for weight in module.parameters():
            if weight.requires_grad:
                self.count_all_reduce(weight.numel(), weight.element_size())

    def sent_bytes(self, steps: int) -> int:
        """Return the bytes that this process sends in each step."""
        return self.sent


class HalfPrecisionAverage(Communication):
    """Gradients are sent in 16 bits; there is no residual."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def average(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Return the future of the averaged bucket, by an all-reduce beside the backward pass."""
        self.count_all_reduce(bucket.buffer().numel(), self.dtype.itemsize)
        # What torch's public hooks call, of which that for bf16 refuses every backend but NCCL.
        return _compress_hook(self.dtype, dist.distributed_c10d._get_default_group(), bucket)


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


class OverlappedAverage(Communication, ABC):
    """Averages buckets by several collectives each, beside the backward pass.

    gloo matches collectives by the order in which each process starts them, so that none may start
    in a callback, when another one happens to end. The next one of each bucket starts when DDP
    brings a further bucket, which all processes do in the same order.
    """

    def __init__(self) -> None:
        super().__init__()
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

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in module.named_parameters()}
        self.device = next(module.parameters()).device
        # By parameter, because DDP may rebuild its buckets. Every process saves its own, so that a
        # resumed training is exact.
        self.residuals: dict[str, torch.Tensor] = {}
        self.state: dict[str, torch.Tensor] = {}
        """What else the next step depends on: of `powersgd` the right factor, by parameter."""

    @abstractmethod
    def compress(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> Compressed:
        """Start to average these parameters' gradients over all ranks, with a loss of precision."""

    def exchange(self, bucket: GradBucket) -> Exchange:
        """Start to average a bucket in place."""
        names = [self.names[id(p)] for p in bucket.parameters()]
        buffer, gradients = bucket.buffer(), bucket.gradients()
        exact = [
            gradient.float() + self.residuals.get(name, 0)
            for name, gradient in zip(names, gradients, strict=True)
        ]
        work, sent, means = yield from self.compress(names, exact)
        self.residuals |= {n: e - s for n, e, s in zip(names, exact, sent, strict=True)}

        def finish() -> torch.Tensor:
            for gradient, mean in zip(gradients, means(), strict=True):
                gradient.copy_(mean)
            return buffer

        return work, finish

    def save(self, checkpoint: Path) -> None:
        """Write this process's residuals into a checkpoint."""
        # The keys are those of checkpoints already written.
        content = io.BytesIO()
        torch.save({"lost": self.residuals, "lossy": self.state}, content)
        write_atomically(residuals_file(checkpoint), content.getvalue())

    def load(self, checkpoint: Path) -> None:
        """Load this process's residuals from a checkpoint, if it has them."""
        file = residuals_file(checkpoint)
        if not file.exists():  # written with another setting of `communication`
            return
        state = torch.load(file, map_location=self.device, weights_only=True)
        self.residuals, self.state = state["lost"], state["lossy"]


class TopK(ErrorFeedback):
    """The entries of largest magnitude of each gradient, with their indices.

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017); Lin et al.,
    "Deep Gradient Compression" (2018), without its momentum correction.
    """

    def __init__(self, module: nn.Module, fraction: float) -> None:
        super().__init__(module)
        self.fraction = fraction

    def compress(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> Compressed:
        """Gather the entries that are sent; all others count as zeros."""
        yield from ()  # the first collective is the last
        flat_N = torch.cat([g.flatten() for g in gradients])
        indices, start = [], 0
        for gradient in gradients:
            count = max(1, math.ceil(self.fraction * gradient.numel()))
            indices.append(start + gradient.flatten().abs().topk(count).indices)
            start += gradient.numel()
        indices_K = torch.cat(indices)
        sent_N = torch.zeros_like(flat_N)
        sent_N[indices_K] = flat_N[indices_K]
        work, gathered = self.start_gather(indices_K.to(torch.int32), flat_N[indices_K])

        def means() -> list[torch.Tensor]:
            mean_N = torch.zeros_like(flat_N)
            for their_indices_K, their_values_K in gathered():
                mean_N.index_add_(0, their_indices_K, their_values_K / self.ranks)
            return shaped_like(gradients, mean_N)

        return work, shaped_like(gradients, sent_N), means


class Int8(ErrorFeedback):
    """Each gradient as integers from -127 to 127 and one scale."""

    def __init__(self, module: nn.Module, rounding: Literal["nearest", "stochastic"]) -> None:
        super().__init__(module)
        self.rounding = rounding

    def compress(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> Compressed:
        """Gather the rounded gradients."""
        yield from ()  # the first collective is the last
        sizes = torch.tensor([g.numel() for g in gradients], device=gradients[0].device)
        scales_G = torch.stack([g.abs().max() / 127 for g in gradients])
        # A gradient of zeros has the scale 0.
        tiny = torch.finfo(scales_G.dtype).tiny
        flat_N = torch.cat([g.flatten() for g in gradients])
        steps_N = flat_N / scales_G.clamp_min(tiny).repeat_interleave(sizes)
        if self.rounding == "stochastic":
            # Up with the fraction as probability, so that the expected value is exact (Gupta et
            # al., "Deep Learning with Limited Numerical Precision", 2015). The training loop seeds
            # torch's generator for each step and process.
            steps_N = (steps_N + torch.rand_like(steps_N)).floor()
        integers_N = steps_N.round().clamp(-127, 127).to(torch.int8)
        # Gathered, because a sum of int8 would overflow: that saves a factor of 4 of the bytes with
        # 2 processes, 2 with 4 and nothing with 8.
        work, gathered = self.start_gather(scales_G, integers_N)

        def means() -> list[torch.Tensor]:
            mean_N = torch.zeros_like(flat_N)
            for theirs_G, theirs_N in gathered():
                mean_N += theirs_N * theirs_G.repeat_interleave(sizes) / self.ranks
            return shaped_like(gradients, mean_N)

        sent_N = integers_N * scales_G.repeat_interleave(sizes)
        return work, shaped_like(gradients, sent_N), means


class PowerSGD(ErrorFeedback):
    """Each gradient as a product of two thin matrices, by one step of power iteration.

    Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
    (2019), algorithms 1 and 2, warm-started.
    """

    # torch's own hook keeps its state by bucket, so that a resumed training is not exact.

    def __init__(self, module: nn.Module, rank: int) -> None:
        super().__init__(module)
        self.rank = rank

    def compress(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> Compressed:
        """Average the left factors, then, with an orthonormal left factor, the right ones."""
        # Output channels by all else; a vector is one row.
        matrices = {
            n: g.flatten(1) if g.ndim > 1 else g.reshape(1, -1)
            for n, g in zip(names, gradients, strict=True)
        }
        # Vectors, and matrices smaller than their factors, are averaged uncompressed.
        compressed = {
            n: m_OI for n, m_OI in matrices.items() if self.rank * sum(m_OI.shape) < m_OI.numel()
        }
        exact = {n: m_OI.clone() for n, m_OI in matrices.items() if n not in compressed}
        for name, matrix_OI in compressed.items():
            if name not in self.state:
                # Seeded by name, so that all processes start from the same basis.
                generator = torch.Generator().manual_seed(derive_seed(zlib.crc32(name.encode())))
                random_IR = torch.randn(matrix_OI.shape[1], self.rank, generator=generator)
                self.state[name] = random_IR.to(matrix_OI)
        left = {n: m_OI @ self.state[n] for n, m_OI in compressed.items()}
        mean_right: dict[str, torch.Tensor] = {}
        work, write_means = self.start_mean_([*left.values(), *exact.values()])
        sent = {n: matrices[n] for n in exact}
        if compressed:
            yield work
            write_means()
            left = {n: torch.linalg.qr(p_OR).Q for n, p_OR in left.items()}
            right = {n: compressed[n].T @ p_OR for n, p_OR in left.items()}
            sent |= {n: left[n] @ right[n].T for n in compressed}
            mean_right = {n: q_IR.clone() for n, q_IR in right.items()}
            work, write_means = self.start_mean_(list(mean_right.values()))
        shapes = [(n, g.shape) for n, g in zip(names, gradients, strict=True)]

        def means() -> list[torch.Tensor]:
            write_means()
            # A basis of zeros would stay zero for ever: after a gradient of zeros the old one
            # remains.
            self.state |= {n: q_IR for n, q_IR in mean_right.items() if q_IR.any()}
            mean = {n: left[n] @ mean_right[n].T for n in compressed} | exact
            return [mean[n].view(s) for n, s in shapes]

        return work, [sent[n].view(s) for n, s in shapes], means


class HierarchicalAllReduce(OverlappedAverage):
    """Gradients are averaged within groups of processes first, then between groups.

    After Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision" (2018),
    section 3.3. The result differs from one all-reduce only by the order of summation.
    """

    def __init__(self, group_processes: int, device: str) -> None:
        """Form groups of consecutive ranks, which torchrun places on the same node."""
        super().__init__()
        shape = (self.ranks // group_processes, group_processes)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("between", "within"))
        self.within, self.between = mesh.get_group("within"), mesh.get_group("between")
        self.groups, self.group_processes = shape
        self.sent_between = 0

    def exchange(self, bucket: GradBucket) -> Exchange:
        """Start to average a bucket in place."""
        buffer = bucket.buffer()
        padded_N = F.pad(buffer, (0, -buffer.numel() % self.group_processes))
        shard_S = padded_N.new_empty(padded_N.numel() // self.group_processes)
        self.count_reduce_scatter(shard_S, self.group_processes)
        self.sent_between += self.count_all_reduce(
            shard_S.numel(), shard_S.element_size(), self.groups
        )
        self.count_all_gather(shard_S, self.group_processes)
        # Each of the g processes of a group gets the sum of one g-th within the group,
        yield dist.reduce_scatter_tensor(shard_S, padded_N, group=self.within, async_op=True)
        # completes it with the processes at the same position of other groups,
        yield dist.all_reduce(shard_S, group=self.between, async_op=True)
        # and sends it to its group.
        shard_S.div_(self.ranks)
        gathering: Any = dist.all_gather_into_tensor(
            padded_N, shard_S, group=self.within, async_op=True
        )
        return gathering, lambda: buffer.copy_(padded_N[: buffer.numel()])

    def sent_between_bytes(self, steps: int) -> int:
        """Return the bytes that left the process's group per step since the last call."""
        sent, self.sent_between = self.sent_between, 0
        return sent // steps


def average_gradients_(model: DistributedDataParallel, parallel: Parallel) -> Communication:
    """Register the hook that the settings name; `none` leaves DDP's own all-reduce."""
    device = next(model.parameters()).device.type
    hooks: dict[str, Callable[[], HalfPrecisionAverage | OverlappedAverage]] = {
        "fp16": lambda: HalfPrecisionAverage(torch.float16),
        "bf16": lambda: HalfPrecisionAverage(torch.bfloat16),
        "powersgd": lambda: PowerSGD(model.module, parallel.powersgd_rank),
        "topk": lambda: TopK(model.module, parallel.topk_fraction),
        "int8": lambda: Int8(model.module, parallel.int8_rounding),
        "hierarchical": lambda: HierarchicalAllReduce(parallel.communication_group, device),
    }
    if parallel.communication == "none":
        return DefaultAllReduce(model)
    hook = hooks[parallel.communication]()
    # A lambda, because torch checks the hook's annotations and rejects postponed ones.
    model.register_comm_hook(hook, lambda state, bucket: state.average(bucket))
    return hook


def residuals_file(checkpoint: Path) -> Path:
    """Return the file of this process's residuals."""
    return checkpoint / f"gradients-rank-{dist.get_rank()}.pt"
