"""Lossy averages of gradients over processes, of which each process keeps what was lost."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from compress.common.process import derive_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensors = dict[str, torch.Tensor]


class Wire:
    """The collectives that are used, and the bytes that this process sends through them.

    Counted as sent by a ring, the least for any all-reduce; gloo and NCCL choose their own routes.
    """

    def __init__(self) -> None:
        self.ranks = dist.get_world_size()
        self.sent_bytes = 0
        self.sent_between_bytes = 0
        """Those of them that went to another group of `hierarchical`."""

    def count_mean(self, elements: int, bytes_each: int) -> None:
        """Count an all-reduce that another library does."""
        self.sent_bytes += 2 * (self.ranks - 1) * elements * bytes_each // self.ranks

    def mean_(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its mean over all processes, in place."""
        self.count_mean(tensor.numel(), tensor.element_size())
        dist.all_reduce(tensor)
        tensor.div_(self.ranks)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensor of every process, in the order of their ranks."""
        self.sent_bytes += (self.ranks - 1) * tensor.numel() * tensor.element_size()
        gathered = [torch.empty_like(tensor) for _ in range(self.ranks)]
        dist.all_gather(gathered, tensor)
        return gathered


class GradientCompressor(Protocol):
    """An average that loses something on the way."""

    def average(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], wire: Wire
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what arrived of this process's gradients, and the average of what arrived."""
        ...

    def state_dict(self) -> Tensors:
        """Return what the next step depends on."""
        ...

    def load_state_dict(self, state: Tensors) -> None:
        """Take up what :meth:`state_dict` returned."""
        ...


class TopK:
    """The largest entries of each gradient, with their places.

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent" (2017); Lin et al.,
    "Deep Gradient Compression" (2018), without its momentum correction.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def average(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], wire: Wire
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the entries sent, and the average of those that all processes sent."""
        flat_N = torch.cat([g.flatten() for g in gradients])
        places, start = [], 0
        for gradient in gradients:
            places.append(start + largest(gradient, self.fraction))
            start += gradient.numel()
        places_K = torch.cat(places)
        sent_N, mean_N = torch.zeros_like(flat_N), torch.zeros_like(flat_N)
        sent_N[places_K] = flat_N[places_K]
        everyones_places = wire.gather(places_K.to(torch.int32))
        everyones_values = wire.gather(flat_N[places_K])
        for theirs_K, values_K in zip(everyones_places, everyones_values, strict=True):
            mean_N.index_add_(0, theirs_K, values_K / wire.ranks)
        return shaped_like(gradients, sent_N), shaped_like(gradients, mean_N)

    def state_dict(self) -> Tensors:
        """Return nothing: a step depends on its gradients alone."""
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Take up nothing."""


class Int8:
    """Each gradient as integers from -127 to 127 and one scale.

    Every process sends its integers to every other one, because a sum of int8 overflows: the bytes
    saved are a factor of 4 with 2 processes, 2 with 4 and none with 8.
    """

    def average(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], wire: Wire
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the gradients after rounding, and the average of everyone's."""
        sizes = torch.tensor([g.numel() for g in gradients], device=gradients[0].device)
        scales_G = torch.stack([g.abs().max() / 127 for g in gradients])
        tiny = torch.finfo(scales_G.dtype).tiny
        flat_N = torch.cat([g.flatten() for g in gradients])
        steps_N = flat_N / scales_G.clamp_min(tiny).repeat_interleave(sizes)
        integers_N = steps_N.round().clamp(-127, 127).to(torch.int8)
        mean_N = torch.zeros_like(flat_N)
        integers, scales = wire.gather(integers_N), wire.gather(scales_G)
        for theirs_N, theirs_G in zip(integers, scales, strict=True):
            mean_N += theirs_N * theirs_G.repeat_interleave(sizes) / wire.ranks
        sent_N = integers_N * scales_G.repeat_interleave(sizes)
        return shaped_like(gradients, sent_N), shaped_like(gradients, mean_N)

    def state_dict(self) -> Tensors:
        """Return nothing: a step depends on its gradients alone."""
        return {}

    def load_state_dict(self, state: Tensors) -> None:
        """Take up nothing."""


class PowerSGD:
    """Each gradient as a product of two thin matrices, by one step of power iteration.

    Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization"
    (2019), algorithms 1 and 2, warm-started. Vectors, and matrices that the factors would not make
    smaller, are averaged whole. torch's own hook is not used: it keeps its state by bucket, so that
    a resumed training is not exact.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.bases: Tensors = {}
        """The right factor of the step before, by parameter."""

    def average(
        self, names: Sequence[str], gradients: Sequence[torch.Tensor], wire: Wire
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return this process's projections, and the average of everyone's."""
        matrices = {n: as_matrix(g) for n, g in zip(names, gradients, strict=True)}
        thin = {n: m_OI for n, m_OI in matrices.items() if self._is_worth_it(m_OI)}
        whole = {n: m_OI.clone() for n, m_OI in matrices.items() if n not in thin}
        left = {n: m_OI @ self._basis(n, m_OI) for n, m_OI in thin.items()}
        mean_together_([*left.values(), *whole.values()], wire)
        left = {n: torch.linalg.qr(p_OR).Q for n, p_OR in left.items()}
        own = {n: thin[n].T @ p_OR for n, p_OR in left.items()}
        everyones = {n: q_IR.clone() for n, q_IR in own.items()}
        mean_together_(list(everyones.values()), wire)
        # A basis of zeros would stay so for ever: a gradient of zeros keeps the one before it.
        self.bases |= {n: q_IR for n, q_IR in everyones.items() if q_IR.any()}
        sent = {n: left[n] @ own[n].T for n in thin} | {n: matrices[n] for n in whole}
        mean = {n: left[n] @ everyones[n].T for n in thin} | whole
        shapes = [(n, g.shape) for n, g in zip(names, gradients, strict=True)]
        return [sent[n].view(s) for n, s in shapes], [mean[n].view(s) for n, s in shapes]

    def state_dict(self) -> Tensors:
        """Return the bases."""
        return dict(self.bases)

    def load_state_dict(self, state: Tensors) -> None:
        """Take up the bases."""
        self.bases = dict(state)

    def _is_worth_it(self, matrix_OI: torch.Tensor) -> bool:
        rows, columns = matrix_OI.shape
        return self.rank * (rows + columns) < rows * columns

    def _basis(self, name: str, matrix_OI: torch.Tensor) -> torch.Tensor:
        if name not in self.bases:
            generator = torch.Generator().manual_seed(derive_seed(zlib.crc32(name.encode())))
            drawn_IR = torch.randn(matrix_OI.shape[1], self.rank, generator=generator)
            self.bases[name] = drawn_IR.to(matrix_OI)
        return self.bases[name]


def largest(gradient: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return the flat places of the largest entries, at least one."""
    count = max(1, math.ceil(fraction * gradient.numel()))
    return gradient.flatten().abs().topk(count).indices


def as_matrix(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a matrix: output channels by everything else; a vector as one row."""
    return gradient.flatten(1) if gradient.ndim > 1 else gradient.reshape(1, -1)


def mean_together_(tensors: Sequence[torch.Tensor], wire: Wire) -> None:
    """Replace tensors by their means over all processes, in place, in one exchange."""
    if not tensors:
        return
    flat_N = torch.cat([t.flatten() for t in tensors])
    wire.mean_(flat_N)
    for tensor, mean in zip(tensors, shaped_like(tensors, flat_N), strict=True):
        tensor.copy_(mean)


def shaped_like(tensors: Sequence[torch.Tensor], flat_N: torch.Tensor) -> list[torch.Tensor]:
    """Cut a flat tensor into parts of other tensors' shapes."""
    parts = torch.split(flat_N, [t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
