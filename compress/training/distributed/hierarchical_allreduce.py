"""All-reduce in two levels, so that little data crosses the slow network between groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from compress.training.distributed.gradient_compression import CommCounter

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]
    from torch.futures import Future


class HierarchicalAllReduce:
    """Gradients are averaged within groups of processes first, then between groups.

    A reduce-scatter within a group gives each of its g processes the sum of one g-th; an all-reduce
    with the processes at the same position of other groups completes that sum; an all-gather within
    the group distributes it. After Jia et al., "Highly Scalable Deep Learning Training System with
    Mixed-Precision" (2018), section 3.3, and as in NCCL's trees and Horovod.

    Nothing is compressed: the result differs from one all-reduce only by the order of summation.
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
        dist.reduce_scatter_tensor(shard_S, padded_N, group=self.within)
        dist.all_reduce(shard_S, group=self.between)
        dist.all_gather_into_tensor(padded_N, shard_S.div_(self.comm.ranks), group=self.within)
        buffer.copy_(padded_N[: buffer.numel()])
        # Counted as rings, as for the other settings; a buffer is g shards.
        shard_bytes = shard_S.numel() * shard_S.element_size()
        between = 2 * (self.groups - 1) * shard_bytes // self.groups
        self.comm.sent_between_bytes += between
        self.comm.sent_bytes += 2 * (self.group_processes - 1) * shard_bytes + between
        done: Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done
