"""Averaging gradients in two levels, so that little crosses the slow network between groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from compress.training.distributed.gradient_compression import Wire

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
    from torch.futures import Future


class Hierarchical:
    """Gradients averaged within groups of processes first, and each share between groups.

    A reduce-scatter within a group leaves each of its g processes the sum of a g-th; an all-reduce
    with the processes of the same place in other groups makes it the sum of all; an all-gather
    within the group hands it round. After Jia et al., "Highly Scalable Deep Learning Training
    System with Mixed-Precision" (2018), section 3.3, and as in NCCL's trees and Horovod.

    Nothing is lost: sums are only made in another order than one all-reduce makes them.
    """

    def __init__(self, group_processes: int, device: str) -> None:
        """Form the groups: consecutive ranks, which torchrun's agent places on one node."""
        self.wire = Wire()
        shape = (self.wire.ranks // group_processes, group_processes)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("between", "within"))
        self.within, self.between = mesh.get_group("within"), mesh.get_group("between")
        self.groups, self.group_processes = shape

    def average(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Average in place, and return a future that is done."""
        buffer = bucket.buffer()
        whole_N = F.pad(buffer, (0, -buffer.numel() % self.group_processes))
        share_S = whole_N.new_empty(whole_N.numel() // self.group_processes)
        dist.reduce_scatter_tensor(share_S, whole_N, group=self.within)
        dist.all_reduce(share_S, group=self.between)
        dist.all_gather_into_tensor(whole_N, share_S.div_(self.wire.ranks), group=self.within)
        buffer.copy_(whole_N[: buffer.numel()])
        self._count(share_S.numel() * share_S.element_size())
        done: Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    def _count(self, share_bytes: int) -> None:
        """Enter what this process sent, by rings as everywhere: of a whole, its g shares."""
        between = 2 * (self.groups - 1) * share_bytes // self.groups
        self.wire.sent_between_bytes += between
        self.wire.sent_bytes += 2 * (self.group_processes - 1) * share_bytes + between
