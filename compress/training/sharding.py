"""Fully sharded data parallelism: weights, gradients and optimizer state spread over the ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from compress.training.blocks import large_blocks, named_blocks
from compress.training.parallel import DataParallel
from compress.training.resume import copy_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from compress.training.resume import Tensors
    from compress.training.settings import Parallel, Training

WHOLE_ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
WHOLE = StateDictOptions(full_state_dict=True)
PRECISION = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Sharded(DataParallel):
    """Every rank holds a part of each weight, and gathers a block's when it is computed.

    After Zhao et al., "PyTorch FSDP" (2023), and ZeRO's stages 2 and 3; over ``fully_shard``.
    """

    def wrap(self, module: nn.Module, training: Training) -> nn.Module:
        """Shard the module in place, block by block, and return it."""
        parallel = self.parallel
        device = next(module.parameters()).device.type
        dtype = PRECISION[training.precision]
        policy: dict[str, Any] = {
            "mesh": mesh_of(parallel, self.ranks, device),
            "reshard_after_forward": parallel.sharding_mode != "shard_grad_op",
            "offload_policy": _offload(parallel, device),
        }
        # Sums of gradients are fp32, and so is what the loss sees.
        inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
        outer = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=dtype and torch.float32,
            output_dtype=dtype and torch.float32,
        )
        for block in blocks_to_wrap(module, parallel):
            fully_shard(block, mp_policy=inner, **policy)
        fully_shard(module, mp_policy=outer, **policy)
        return module

    @contextmanager
    def micro_step(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Reduce gradients in the last part of a step only; whole ones are kept until then."""
        wrapped.set_requires_gradient_sync(last)  # type: ignore[operator]  # an FSDPModule
        yield

    def weights(self, module: nn.Module) -> Tensors:
        """Gather the state dict on rank 0, in memory of its own."""
        return copy_of(cast("Tensors", get_model_state_dict(module, options=WHOLE_ON_RANK_0)))

    def load_weights_(self, module: nn.Module, weights: Tensors) -> None:
        """Take this rank's parts, in place."""
        set_model_state_dict(module, dict(weights), options=WHOLE)

    def optimizer_state(
        self, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Gather the optimizer's state on rank 0."""
        return get_optimizer_state_dict(module, optimizer, options=WHOLE_ON_RANK_0)

    def load_optimizer_(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Take this rank's parts, in place."""
        set_optimizer_state_dict(module, optimizer, state, options=WHOLE)

    def settle_(self, module: nn.Module) -> None:
        """Let go of gathered weights: the next forward must gather what the shards then hold."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def mesh_of(parallel: Parallel, ranks: int, device: str) -> DeviceMesh:
    """Return the mesh over which weights are sharded and, where it has two axes, replicated."""
    if parallel.sharding_mode in ("full_shard", "shard_grad_op"):
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    whole = parallel.sharding_mode == "no_shard"
    shares = 1 if whole else parallel.shard_processes or max(1, ranks // 2)
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


def _offload(parallel: Parallel, device: str) -> OffloadPolicy:
    if not parallel.cpu_offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=device == "cuda")
