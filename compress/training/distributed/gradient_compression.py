"""Compressed averages of gradients over processes: top-k, int8 and PowerSGD."""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from compress.common.process import derive_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all processes, in the order of their ranks."""
        self.count_all_gather(tensor, self.ranks)
        gathered = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(gathered, tensor)
        return gathered

    def per_step(self, steps: int) -> int:
        """Return the bytes sent per step since the last call."""
        sent, self.sent_bytes = self.sent_bytes, 0
        return sent // steps


class GradientCompressor(ABC):
    """Averages gradients with a loss of precision."""

    @abstractmethod
    def average(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], comm: CommCounter
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what is sent of these parameters' gradients, and the average over all ranks."""

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

    def average(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], comm: CommCounter
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the entries that are sent, else zeros, and their average over all processes."""
        flat_N = torch.cat([g.flatten() for g in gradients])
        indices, start = [], 0
        for gradient in gradients:
            count = max(1, math.ceil(self.fraction * gradient.numel()))
            indices.append(start + gradient.flatten().abs().topk(count).indices)
            start += gradient.numel()
        indices_K = torch.cat(indices)
        sent_N, mean_N = torch.zeros_like(flat_N), torch.zeros_like(flat_N)
        sent_N[indices_K] = flat_N[indices_K]
        all_indices = comm.gather(indices_K.to(torch.int32))
        all_values = comm.gather(flat_N[indices_K])
        for their_indices_K, their_values_K in zip(all_indices, all_values, strict=True):
            mean_N.index_add_(0, their_indices_K, their_values_K / comm.ranks)
        return shaped_like(gradients, sent_N), shaped_like(gradients, mean_N)


class Int8(GradientCompressor):
    """Each gradient as integers from -127 to 127 and one scale."""

    def average(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], comm: CommCounter
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the rounded gradients, and their average over all processes."""
        sizes = torch.tensor([g.numel() for g in gradients], device=gradients[0].device)
        scales_G = torch.stack([g.abs().max() / 127 for g in gradients])
        # A gradient of zeros has the scale 0.
        tiny = torch.finfo(scales_G.dtype).tiny
        flat_N = torch.cat([g.flatten() for g in gradients])
        steps_N = flat_N / scales_G.clamp_min(tiny).repeat_interleave(sizes)
        integers_N = steps_N.round().clamp(-127, 127).to(torch.int8)
        mean_N = torch.zeros_like(flat_N)
        # Gathered, because a sum of int8 would overflow: that saves a factor of 4 of the bytes with
        # 2 processes, 2 with 4 and nothing with 8.
        integers, scales = comm.gather(integers_N), comm.gather(scales_G)
        for theirs_N, theirs_G in zip(integers, scales, strict=True):
            mean_N += theirs_N * theirs_G.repeat_interleave(sizes) / comm.ranks
        sent_N = integers_N * scales_G.repeat_interleave(sizes)
        return shaped_like(gradients, sent_N), shaped_like(gradients, mean_N)


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

    def average(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], comm: CommCounter
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this process's low-rank gradients, and their average over all processes."""
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
        all_reduce_mean_([*left.values(), *exact.values()], comm)
        left = {n: torch.linalg.qr(p_OR).Q for n, p_OR in left.items()}
        right = {n: compressed[n].T @ p_OR for n, p_OR in left.items()}
        mean_right = {n: q_IR.clone() for n, q_IR in right.items()}
        all_reduce_mean_(list(mean_right.values()), comm)
        # A basis of zeros would stay zero for ever: after a gradient of zeros the old one remains.
        self.bases |= {n: q_IR for n, q_IR in mean_right.items() if q_IR.any()}
        sent = {n: left[n] @ right[n].T for n in compressed} | {n: matrices[n] for n in exact}
        mean = {n: left[n] @ mean_right[n].T for n in compressed} | exact
        shapes = [(n, g.shape) for n, g in zip(names, gradients, strict=True)]
        return [sent[n].view(s) for n, s in shapes], [mean[n].view(s) for n, s in shapes]

    def state_dict(self) -> Tensors:
        """Return the right factors."""
        return dict(self.bases)

    def load_state_dict(self, state: Tensors) -> None:
        """Load the right factors."""
        self.bases = dict(state)


def all_reduce_mean_(tensors: Sequence[torch.Tensor], comm: CommCounter) -> None:
    """Replace tensors by their means over all processes, in place, in one all-reduce."""
    if not tensors:
        return
    flat_N = torch.cat([t.flatten() for t in tensors])
    comm.count_all_reduce(flat_N.numel(), flat_N.element_size())
    dist.all_reduce(flat_N)
    flat_N.div_(comm.ranks)
    for tensor, mean in zip(tensors, shaped_like(tensors, flat_N), strict=True):
        tensor.copy_(mean)


def shaped_like(tensors: Sequence[torch.Tensor], flat_N: torch.Tensor) -> list[torch.Tensor]:
    """Split a flat tensor into tensors of the given shapes."""
    parts = torch.split(flat_N, [t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
