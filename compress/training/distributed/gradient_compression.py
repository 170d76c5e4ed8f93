"""Compressed averages of gradients over processes: top-k, int8 and PowerSGD."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from compress.common.process import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

Tensors = dict[str, torch.Tensor]


class CommCounter:
    """Counts the bytes that this process sends in collectives, and runs some of them."""

    def __init__(self) -> None:
        self.ranks = dist.get_world_size()
        self.sent_bytes = 0
        self.sent_between_bytes = 0
        """Bytes of them that left the process's group of `hierarchical`."""

    def count_all_reduce(self, elements: int, bytes_each: int, ranks: int | None = None) -> int:
        """Count an all-reduce that other code runs, and return its bytes."""
        # As in a ring, the minimum for any all-reduce; gloo's are rings, NCCL chooses for itself.
        ranks = ranks or self.ranks
        sent = 2 * (ranks - 1) * elements * bytes_each // ranks
        self.sent_bytes += sent
        return sent

    def count_all_gather(self, shard: torch.Tensor, ranks: int) -> None:
        """Count a ring that gathers such a shard of each process."""
        self.sent_bytes += (ranks - 1) * shard.nbytes

    def count_reduce_scatter(self, shard: torch.Tensor, ranks: int) -> None:
        """Count a ring after which each process has the sum of such a shard."""
        # Gloo, which main memory is for, all-reduces the whole and drops the rest (torch 2.13).
        self.sent_bytes += (2 if shard.is_cpu else 1) * (ranks - 1) * shard.nbytes

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

    def per_step(self, steps: int) -> int:
        """Return the bytes sent per step since the last call."""
        sent, self.sent_bytes = self.sent_bytes, 0
        return sent // steps


@dataclass(frozen=True)
class LastCollective:
    """The last collective of an average, after which nothing more is sent."""

    work: Any
    sent: list[torch.Tensor]
    """What this process's gradients are after compression."""
    means: Callable[[], list[torch.Tensor]]
    """Computes the averages over all ranks, once the work is done, in any thread."""


class GradientCompressor(ABC):
    """Averages gradients with a loss of precision."""

    @abstractmethod
    def exchange(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], comm: CommCounter
    ) -> Generator[Any, None, LastCollective]:
        """Start to average these parameters' gradients over all ranks.

        Yields the work of each collective but the last, and goes on when that is done.
        """

    def state_dict(self) -> Tensors:
        """Return the state that the next step depends on; by default there is none."""
        return {}

    def load_state_dict(self, state: Tensors) -> None:  # noqa: B027 - nothing to load by default
        """Load what :meth:`state_dict` returned."""


class TopK(GradientCompressor):
    """The entries of largest magnitude of each gradient, with their indices.

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017); Lin et al.,
    "Deep Gradient Compression" (2018), without its momentum correction.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def exchange(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], comm: CommCounter
    ) -> Generator[Any, None, LastCollective]:
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
        work, gathered = comm.start_gather(indices_K.to(torch.int32), flat_N[indices_K])

        def means() -> list[torch.Tensor]:
            mean_N = torch.zeros_like(flat_N)
            for their_indices_K, their_values_K in gathered():
                mean_N.index_add_(0, their_indices_K, their_values_K / comm.ranks)
            return shaped_like(gradients, mean_N)

        return LastCollective(work, shaped_like(gradients, sent_N), means)


class Int8(GradientCompressor):
    """Each gradient as integers from -127 to 127 and one scale."""

    def __init__(self, rounding: Literal["nearest", "stochastic"]) -> None:
        self.rounding = rounding

    def exchange(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], comm: CommCounter
    ) -> Generator[Any, None, LastCollective]:
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
        work, gathered = comm.start_gather(scales_G, integers_N)

        def means() -> list[torch.Tensor]:
            mean_N = torch.zeros_like(flat_N)
            for theirs_G, theirs_N in gathered():
                mean_N += theirs_N * theirs_G.repeat_interleave(sizes) / comm.ranks
            return shaped_like(gradients, mean_N)

        sent_N = integers_N * scales_G.repeat_interleave(sizes)
        return LastCollective(work, shaped_like(gradients, sent_N), means)


class PowerSGD(GradientCompressor):
    """Each gradient as a product of two thin matrices, by one step of power iteration.

    Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
    (2019), algorithms 1 and 2, warm-started.
    """

    # torch's own hook keeps its state by bucket, so that a resumed training is not exact.

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bases: Tensors = {}
        """The right factor of the previous step, by parameter."""

    def exchange(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], comm: CommCounter
    ) -> Generator[Any, None, LastCollective]:
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
            if name not in self.bases:
                # Seeded by name, so that all processes start from the same basis.
                generator = torch.Generator().manual_seed(derive_seed(zlib.crc32(name.encode())))
                random_IR = torch.randn(matrix_OI.shape[1], self.rank, generator=generator)
                self.bases[name] = random_IR.to(matrix_OI)
        left = {n: m_OI @ self.bases[n] for n, m_OI in compressed.items()}
        mean_right: Tensors = {}
        work, write_means = comm.start_mean_([*left.values(), *exact.values()])
        sent = {n: matrices[n] for n in exact}
        if compressed:
            yield work
            write_means()
            left = {n: torch.linalg.qr(p_OR).Q for n, p_OR in left.items()}
            right = {n: compressed[n].T @ p_OR for n, p_OR in left.items()}
            sent |= {n: left[n] @ right[n].T for n in compressed}
            mean_right = {n: q_IR.clone() for n, q_IR in right.items()}
            work, write_means = comm.start_mean_(list(mean_right.values()))
        shapes = [(n, g.shape) for n, g in zip(names, gradients, strict=True)]

        def means() -> list[torch.Tensor]:
            write_means()
            # A basis of zeros would stay zero for ever: after a gradient of zeros the old one
            # remains.
            self.bases |= {n: q_IR for n, q_IR in mean_right.items() if q_IR.any()}
            mean = {n: left[n] @ mean_right[n].T for n in compressed} | exact
            return [mean[n].view(s) for n, s in shapes]

        return LastCollective(work, [sent[n].view(s) for n, s in shapes], means)

    def state_dict(self) -> Tensors:
        """Return the right factors."""
        return dict(self.bases)

    def load_state_dict(self, state: Tensors) -> None:
        """Load the right factors."""
        self.bases = dict(state)


def shaped_like(tensors: Sequence[torch.Tensor], flat_N: torch.Tensor) -> list[torch.Tensor]:
    """Split a flat tensor into tensors of the given shapes."""
    parts = torch.split(flat_N, [t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
