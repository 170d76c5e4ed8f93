"""Fully sharded data parallelism (FSDP2): weights, gradients and optimizer state in shards."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from compress.training.checkpoint.sharded_loading import DeferredWeights
from compress.training.distributed.ddp import DDPStrategy
from compress.training.optim.compile import compile_
from compress.training.optim.transformer_blocks import large_blocks, named_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from compress.artifacts.eager_model import EagerModel
    from compress.data.batch import Batch
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Training

PRECISION = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDPStrategy(DDPStrategy):
    """Every rank has a shard of each weight; a block's weights are gathered while it computes.

    After Zhao et al., "PyTorch FSDP" (2023), and ZeRO's stages 2 and 3; by torch's ``fully_shard``.
    """

    deferred: DeferredWeights | None = None

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
        if self.deferred:
            self.deferred.fill_(module, offloaded=self.parallel.cpu_offload)
        return module

    @contextmanager
    def gradient_sync(self, wrapped: nn.Module, is_last: bool) -> Iterator[None]:
        """Reduce-scatter gradients in the last micro-batch only; until then they are unsharded."""
        wrapped.set_requires_gradient_sync(is_last)  # type: ignore[operator]  # an FSDPModule
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
    parallel, dtype = training.parallel, PRECISION[training.precision]
    policy: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": parallel.sharding_mode != "shard_grad_op",
        "offload_policy": (
            CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
            if parallel.cpu_offload
            else OffloadPolicy()
        ),
    }
    # Gradients are summed in fp32, and the loss gets fp32 outputs.
    inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
    outer = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=dtype and torch.float32,
        output_dtype=dtype and torch.float32,
    )
    for block in blocks:
        fully_shard(block, mp_policy=inner, **policy)
    fully_shard(module, mp_policy=outer, **policy)
    if parallel.prefetch:
        chosen = {id(block) for block in blocks}
        in_order = [part for part in module.modules() if id(part) in chosen]
        prefetch_(in_order, parallel.prefetch)


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
    """Return the submodules whose weights are gathered one at a time, inner ones first.

    Raises:
        StageFailed: no submodule has a named class.
    """
    if isinstance(parallel.wrap, int):
        return large_blocks(module, parallel.wrap)
    return named_blocks(module, parallel.wrap, "parallel.wrap")


def prefetch_(blocks: Sequence[Any], count: int) -> None:
    """Let each sharded block gather the weights of the next ones while it computes.

    In the backward pass these are the preceding ones. Results are right for any order in which the
    model calls its blocks; only this order saves time.

    Args:
        blocks: FSDP modules in the order of the forward pass.
        count: how many blocks to gather ahead.
    """
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + count])
        before = blocks[max(0, index - count) : index]
        block.set_modules_to_backward_prefetch(before[::-1])
