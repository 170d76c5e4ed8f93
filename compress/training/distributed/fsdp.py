"""Fully sharded data parallelism: weights, gradients and optimizer state spread over the ranks."""

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

from compress.training.checkpoint.sharded_loading import Unfilled
from compress.training.distributed.ddp import DDPStrategy
from compress.training.optim.compile import compile_
from compress.training.optim.transformer_blocks import large_blocks, named_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from compress.artifacts.eager_model import EagerModel
    from compress.data.splits import Batch
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Training

PRECISION = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDPStrategy(DDPStrategy):
    """Every rank holds a part of each weight, and gathers a block's when it is computed.

    After Zhao et al., "PyTorch FSDP" (2023), and ZeRO's stages 2 and 3; over ``fully_shard``.
    """

    unfilled: Unfilled | None = None

    def load(self, model: EagerModel, device: str) -> nn.Module:
        """Return the module without weights, where it can be built so; each rank reads its part."""
        module, self.unfilled = Unfilled.of(model, device)
        return module

    def wrap(
        self, module: nn.Module, training: Training, example: Callable[[], Batch]
    ) -> nn.Module:
        """Shard the module in place, block by block, and return it."""
        compile_(module, training)
        place = self.unfilled.device if self.unfilled else next(module.parameters()).device
        mesh = mesh_of(self.parallel, self.ranks, torch.device(place).type)
        shard_(module, blocks_to_wrap(module, self.parallel), training, mesh)
        if self.unfilled:
            self.unfilled.fill_(module, offloaded=self.parallel.cpu_offload)
        return module

    @contextmanager
    def micro_step(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Reduce gradients in the last part of a step only; whole ones are kept until then."""
        wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]  # an FSDPModule
        yield

    def release_buffers_(self, module: nn.Module) -> None:
        """Let go of gathered weights: the next forward must gather what the shards then hold."""
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
        "offload_policy": _offload(parallel, mesh.device_type),
    }
    # Sums of gradients are fp32, and so is what the loss sees.
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
        prefetch_(in_order_of(module, blocks), parallel.prefetch)


def mesh_of(parallel: Parallel, ranks: int, device: str) -> DeviceMesh:
    """Return the mesh over which weights are sharded and, where it has two axes, replicated."""
    if parallel.sharding_mode in ("full_shard", "shard_grad_op"):
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    whole = parallel.sharding_mode == "no_shard"
    shares = 1 if whole else parallel.shard_group
    return init_device_mesh(
        device, (ranks // shares, shares), mesh_dim_names=("replicate", "shard")
    )


def blocks_to_wrap(module: nn.Module, parallel: Parallel) -> list[nn.Module]:
    """Return the parts that are gathered one at a time, inner ones first.

    Raises:
        StageFailed: no part has a named class.
    """
    if isinstance(parallel.wrap, int):
        return large_blocks(module, parallel.wrap)
    return named_blocks(module, parallel.wrap, "parallel.wrap")


def in_order_of(module: nn.Module, blocks: Sequence[nn.Module]) -> list[FSDPModule]:
    """Return sharded blocks in the order in which the module holds them."""
    chosen = {id(block) for block in blocks}
    return [p for p in module.modules() if id(p) in chosen and isinstance(p, FSDPModule)]


def prefetch_(blocks: list[FSDPModule], count: int) -> None:
    """Gather so many of the next blocks while one is computed, in place; backward, of those before.

    Blocks should be called in this order: another one is right too, and wins nothing.
    """
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + count])
        before = blocks[max(0, index - count) : index]
        block.set_modules_to_backward_prefetch(before[::-1])


def _offload(parallel: Parallel, device: str) -> OffloadPolicy:
    if not parallel.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device == "cuda")
