"""Fully sharded data parallelism (FSDP2): weights, gradients and optimizer state in shards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)
from torch.nn.modules.batchnorm import _NormBase

from compress.training.checkpoint import DeferredWeights
from compress.training.distributed.ddp import DDPStrategy
from compress.training.distributed.gradient_compression import CommCounter
from compress.training.optim.transformer_blocks import compile_, large_blocks, named_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from compress.artifacts.eager_model import EagerModel
    from compress.data.batch import Batch
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Training

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Layers that compute in float32 at any precision; `_NormBase` is BatchNorm and InstanceNorm."""
PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDPStrategy(DDPStrategy):
    """Every rank has a shard of each weight; a block's weights are gathered while it computes.

    After Zhao et al., "PyTorch FSDP" (2023), and ZeRO's stages 2 and 3; by torch's ``fully_shard``.
    """

    deferred: DeferredWeights | None = None
    comm: CommCounter | None = None
    """Counts what FSDP sends; None for one process, and on a mesh, where others send, too."""

    def load(self, model: EagerModel, device: str) -> nn.Module:
        """Build the module on the meta device if possible; each rank later reads only its shard."""
        module, self.deferred = DeferredWeights.from_model(model, device)
        return module

    def wrap(
        self, module: nn.Module, training: Training, example: Callable[[], Batch]
    ) -> nn.Module:
        """Shard the module in place, block by block, and return it."""
        compile_(module, training)
        device = self.deferred.device if self.deferred else next(module.parameters()).device
        mesh = build_mesh(self.parallel, self.ranks, torch.device(device).type)
        shard_(module, blocks_to_wrap(module, self.parallel), training, mesh)
        self.comm = count_bytes_(module, mesh) if self.ranks > 1 else None
        if self.deferred:
            self.deferred.fill_(module, offloaded=self.parallel.cpu_offload)
        return module

    def sent_bytes(self, steps: int) -> int | None:
        """Return the bytes of gradients and weights sent per training step since the last call."""
        return self.comm.per_step(steps) if self.comm else None

    @contextmanager
    def gradient_sync(self, wrapped: nn.Module, is_last: bool) -> Iterator[None]:
        """Reduce-scatter gradients in the last micro-batch only; until then they are unsharded."""
        if isinstance(wrapped, FSDPModule):  # on a mesh, whole weights are possible too
            wrapped.set_requires_gradient_sync(is_last)
        yield

    def release_buffers_(self, module: nn.Module) -> None:
        """Free gathered weights: the next forward pass must gather the updated shards."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def shard_(
    module: nn.Module, blocks: Sequence[nn.Module], training: Training, mesh: DeviceMesh
) -> None:
    """Shard a module over a mesh, in place, block by block."""
    parallel = training.parallel
    dtype = PRECISION[training.precision] if training.gathers_rounded else None
    policy: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": parallel.sharding_mode != "shard_grad_op",
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")  # torch pins for a device only
            if parallel.cpu_offload
            else OffloadPolicy()
        ),
    }
    reduced = PRECISION[parallel.reduce_dtype]
    inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced)
    # The loss gets fp32 outputs.
    fp32 = dtype and torch.float32
    outer = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, output_dtype=fp32)
    # As FSDP1 does for BatchNorm: torch refuses bf16 weights beside its float32 statistics.
    whole = MixedPrecisionPolicy(torch.float32, torch.float32, output_dtype=dtype)
    norms: list[nn.Module] = []
    if dtype:
        normalizing = [part for part in module.modules() if isinstance(part, NORMS)]
        norms = [part for part in normalizing if next(part.parameters(), None) is not None]
    # The innermost first: the call on a module takes the weights that are left.
    for layer in norms:
        fully_shard(layer, mp_policy=whole, **policy)
    for block in blocks:
        if block not in norms:
            fully_shard(block, mp_policy=inner, **policy)
    fully_shard(module, mp_policy=outer, **policy)
    if parallel.prefetch:
        chosen = set(blocks)
        prefetch_([part for part in module.modules() if part in chosen], parallel.prefetch)


class CountedAllGather(DefaultAllGather):
    """Gathers the weights of a block, and counts what training steps send for it."""

    def __init__(self, module: nn.Module, comm: CommCounter) -> None:
        self.module, self.comm = module, comm

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather all shards."""
        if self.module.training:  # evaluation gathers weights, too, but is no step
            self.comm.count_all_gather(input_tensor, group.size())
        return super().__call__(output_tensor, input_tensor, group, async_op)


class CountedReduceScatter(DefaultReduceScatter):
    """Sums the gradients of a block over processes, and counts what is sent for it."""

    def __init__(self, comm: CommCounter) -> None:
        self.comm = comm

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work:
        """Sum, and keep this process's shard of the sums."""
        self.comm.count_reduce_scatter(output_tensor, group.size())
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


def count_bytes_(module: nn.Module, mesh: DeviceMesh) -> CommCounter:
    """Let a sharded module count the bytes that this process sends in training steps."""
    comm = CommCounter()
    replicas = mesh.size(0) if mesh.ndim > 1 else 1

    def count_sums(sums: torch.Tensor) -> None:
        comm.count_all_reduce(sums.numel(), sums.element_size(), replicas)

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_custom_all_gather(CountedAllGather(module, comm))
            part.set_custom_reduce_scatter(CountedReduceScatter(comm))
            if replicas > 1:
                part.set_all_reduce_hook(count_sums)  # called after FSDP's own
    return comm


def build_mesh(parallel: Parallel, ranks: int, device: str) -> DeviceMesh:
    """Build the mesh for sharding; with two axes, weights are also replicated over the first."""
    if parallel.sharding_mode in ("full_shard", "shard_grad_op"):
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    # no_shard is a mesh whose shards are the whole weights.
    shards = 1 if parallel.sharding_mode == "no_shard" else parallel.shard_group
    return init_device_mesh(
        device, (ranks // shards, shards), mesh_dim_names=("replicate", "shard")
    )


def blocks_to_wrap(module: nn.Module, parallel: Parallel) -> list[nn.Module]:
    """Return the submodules whose weights are gathered one at a time, inner ones first."""
    if isinstance(parallel.wrap, int):
        return large_blocks(module, parallel.wrap)
    return named_blocks(module, parallel.wrap, "parallel.wrap")


def prefetch_(blocks: Sequence[Any], count: int) -> None:
    """Let each sharded block gather the weights of the next ones while it computes."""
    # Results are right for any order in which the model calls its blocks; this one saves time.
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + count])
        before = blocks[max(0, index - count) : index]
        block.set_modules_to_backward_prefetch(before[::-1])
