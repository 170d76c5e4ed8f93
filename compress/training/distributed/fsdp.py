"""Fully sharded data parallelism (FSDP2), and meshes with tensor and pipeline parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _take_tensors
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
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase

from compress.common.errors import StageFailed
from compress.training.checkpoint import DeferredWeights
from compress.training.config.parallel import Parallel, Prefetch
from compress.training.distributed.base import Example, wait_for_hours_on_cpu
from compress.training.distributed.ddp import DDPStrategy
from compress.training.distributed.gradient_compression import Communication, shaped_like
from compress.training.model_parallel.equivalence_check import (
    ReferenceRun,
    compare,
    first_and_count,
    forward_and_backward,
)
from compress.training.model_parallel.pipeline_parallel import PipelineRunner, split_into_parts
from compress.training.model_parallel.tensor_parallel import HOW, divided_, split_matrices_
from compress.training.optim.transformer_blocks import compile_, large_blocks, named_blocks

if TYPE_CHECKING:
    from compress.artifacts.eager_model import EagerModel
    from compress.training.config.training import Training
    from compress.training.model_parallel.pipeline_parallel import Partition
    from compress.training.model_parallel.tensor_parallel import Attributes

NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
"""Layers that compute in float32 at any precision; `_NormBase` is BatchNorm and InstanceNorm."""
PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class FSDPStrategy(DDPStrategy):
    """Every rank has a shard of each weight; a block's weights are gathered while it computes.

    After Zhao et al., "PyTorch FSDP" (2023), and ZeRO's stages 2 and 3; by torch's ``fully_shard``.
    """

    deferred: DeferredWeights | None = None

    def load(self, model: EagerModel, device: str) -> nn.Module:
        """Build the module on the meta device if possible; each rank later reads only its shard."""
        module, self.deferred = DeferredWeights.from_model(model, device)
        return module

    def wrap(self, module: nn.Module, training: Training, example: Example) -> nn.Module:
        """Shard the module in place, block by block, and return it."""
        compile_(module, training)
        device = self.deferred.device if self.deferred else next(module.parameters()).device
        mesh = build_mesh(self.parallel, self.ranks, torch.device(device).type)
        shard_(module, blocks_to_wrap(module, self.parallel), training, mesh)
        # On a mesh, where others send, too, nothing is counted.
        self.communication = count_bytes_(module, mesh) if self.ranks > 1 else None
        if self.deferred:
            self.deferred.fill_(module, offloaded=self.parallel.cpu_offload)
        return module

    def gradient_sync(self, wrapped: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """Reduce-scatter gradients in the last micro-batch only; until then they are unsharded."""
        if isinstance(wrapped, FSDPModule):  # on a mesh, whole weights are possible too
            wrapped.set_requires_gradient_sync(is_last)
        return nullcontext()

    def release_buffers_(self, module: nn.Module) -> None:
        """Free gathered weights: the next forward pass must gather the updated shards."""
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


class DeviceMeshStrategy(FSDPStrategy):
    """A mesh with the axes pipeline stage, share of the batch and slice of each matrix."""

    def __init__(self, parallel: Parallel) -> None:
        super().__init__(parallel)
        stages = parallel.pipeline.stages if parallel.pipeline else 1
        shape = (stages, self.ranks // parallel.model_ranks, parallel.tensor)
        device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        self.mesh = init_device_mesh(device, shape, mesh_dim_names=("pipeline", "data", "tensor"))
        self.group = self.mesh["data"].get_group()
        for group in self.mesh.get_all_groups():
            wait_for_hours_on_cpu(group)  # new groups have torch's timeouts
        # All processes of one share of the batch read the same samples. Those of one stage also
        # draw the same random numbers, so that what each computes, dropout included, is identical.
        self.rank, self.ranks = self.mesh["data"].get_local_rank(), shape[1]
        self.rng_stream = self.rank + self.ranks * self.mesh["pipeline"].get_local_rank()
        self.partial_gradients: list[str] = []
        """Weights whose gradients must be summed over the processes of `tensor`."""

    def wrap(self, module: nn.Module, training: Training, example: Example) -> nn.Module:
        """Divide the module in place, and compare outputs and gradients with the whole one's."""
        own_device = next(module.parameters()).device
        device = torch.device(self.deferred.device) if self.deferred else own_device
        reference, partition = self._record_whole(module, example)
        candidates: list[Attributes] = [[]]
        if self.parallel.tensor > 1:  # first, so that FSDP then shards each slice
            candidates = split_matrices_(module, self.parallel, self.mesh["tensor"])
        if (settings := self.parallel.pipeline) and partition:
            group = self.mesh["pipeline"].get_group()
            self.pipeline = PipelineRunner(module, partition, settings, group, device)
            tied = self.pipeline.tied_stages
            # Gradients of slices or shards in several stages cannot be summed.
            if tied and (self.parallel.sharding_mode or self.parallel.tensor > 1):
                raise StageFailed(
                    f"parallel.pipeline: several stages use the weight {first_and_count(tied)}, "
                    "which works with strategy: ddp, and without tensor"
                )
        if self.deferred:
            self.deferred.fill_(module, offloaded=False)
        self._check_division(module, reference.on(device), candidates)
        compile_(module, training)
        if self.parallel.sharding_mode:
            # A block without weights of this stage's has nothing to shard.
            blocks = blocks_to_wrap(module, self.parallel)
            blocks = [b for b in blocks if next(b.parameters(), None) is not None]
            if self.pipeline:
                blocks = self.pipeline.without_split_points(blocks)
            shard_(module, blocks, training, self.mesh["data"])
        if self.pipeline:
            self.pipeline.register_hooks()  # prepended, so after FSDP has registered its own
        return module

    def _record_whole(
        self, module: nn.Module, example: Example
    ) -> tuple[ReferenceRun, Partition | None]:
        """Run the whole module in rank 0 alone; all get its outputs and its division into parts."""
        found: Any = None
        if self.is_main:
            inputs, settings = example().inputs, self.parallel.pipeline
            if self.deferred:
                inputs = tuple(x.cpu() for x in inputs)
            with self.deferred.mapped(module) if self.deferred else nullcontext():
                reference = ReferenceRun.record(module, inputs)
                try:
                    partition = split_into_parts(module, settings, inputs) if settings else None
                    found = reference, partition
                except StageFailed as error:
                    found = error
        found = self.broadcast(found)
        if isinstance(found, StageFailed):
            raise found
        return cast("tuple[ReferenceRun, Partition | None]", found)

    def _check_division(
        self, module: nn.Module, reference: ReferenceRun, candidates: list[Attributes]
    ) -> None:
        """Divide the first set of attributes by which the divided model equals the whole one."""
        tensor, pipeline, wrong = self.parallel.tensor, self.pipeline, ""
        compute_gradients_: Any = partial(forward_and_backward, module)
        if pipeline:
            compute_gradients_ = pipeline.compute_probing_gradients_
        group = self.mesh["tensor"].get_group()
        # Removed at the end: FSDP must register its own hooks first.
        with pipeline.register_hooks() if pipeline else nullcontext():
            for attributes in candidates:
                with divided_(attributes, tensor) as division:
                    found = compare(module, reference, group, compute_gradients_)
                    self.partial_gradients, mismatch = found
                    if not mismatch:
                        division.pop_all()
                        return
                wrong = wrong or mismatch
        if tensor > 1:
            raise StageFailed(
                f"parallel.tensor: split over {tensor} processes the model does not compute what "
                f"the whole one does: {wrong}; {HOW}, and leave out layers whose outputs are not "
                "heads or neurons"
            )
        raise StageFailed(
            "parallel.pipeline: divided into stages the model does not compute what the whole one "
            f"does: {wrong}; name modules in pipeline.split that take the one tensor on which all "
            "later modules depend"
        )

    def optimizer(self, module: nn.Module, training: Training) -> torch.optim.Optimizer:
        """Build the optimizer of this process's stage, which must have something to train."""
        if self.pipeline and not any(weight.requires_grad for weight in module.parameters()):
            raise StageFailed(
                f"parallel.pipeline: stage {self.pipeline.stage} has no weights that require "
                "gradients; choose pipeline.split so that each stage has some"
            )
        return super().optimizer(module, training)

    def reduce_gradients_(self, module: nn.Module) -> None:
        """Sum gradients over `tensor` and tied weights; average them over the shares of a batch."""
        weights = dict(module.named_parameters())
        for name in self.partial_gradients:
            gradient = weights[name].grad if name in weights else None
            if gradient is not None:
                dist.all_reduce(local(gradient), group=self.mesh["tensor"].get_group())
        if self.pipeline:
            self.pipeline.sum_tied_gradients_(weights)
        # With sharded weights, FSDP has averaged them in the backward pass.
        if self.parallel.sharding_mode is not None or self.ranks == 1:
            return
        # A weight without a gradient in any copy keeps none, so that the optimizer leaves it alone;
        # where only some copies have one, the others count as zero.
        trained = [weight for weight in weights.values() if weight.requires_grad]
        used = torch.tensor([int(w.grad is not None) for w in trained], dtype=torch.int32)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.group)
        gradients = []
        for weight, is_used in zip(trained, used.tolist(), strict=True):
            if is_used and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if weight.grad is not None:
                gradients.append(local(weight.grad))
        bucket_bytes = int((self.parallel.bucket_mebibytes or 25) * 2**20)
        for bucket in _take_tensors(gradients, bucket_bytes):  # type: ignore[no-untyped-call]
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self.group)
            means = shaped_like(bucket, flat.div_(self.ranks))
            for gradient, mean in zip(bucket, means, strict=True):
                gradient.copy_(mean)


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
    if parallel.buffer_dtype:
        for part in module.modules():
            if not isinstance(part, NORMS):
                round_buffers_(part, PRECISION[parallel.buffer_dtype])
    if parallel.prefetch:
        chosen, ahead = set(blocks), parallel.prefetch
        ahead = Prefetch(forward=ahead, backward=ahead) if isinstance(ahead, int) else ahead
        prefetch_([part for part in module.modules() if part in chosen], ahead)


def round_buffers_(module: nn.Module, dtype: torch.dtype) -> None:
    """Let a module compute with float buffers of another type; between calls they are as stored.

    As FSDP1's `buffer_dtype`, which FSDP2 has not.
    """
    own = [(name, x) for name, x in module._buffers.items() if x is not None]
    names = [name for name, x in own if x.is_floating_point() and x.dtype != dtype]
    replaced: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def replace(*_: Any) -> None:
        for name in names:
            stored: Any = module._buffers[name]
            module._buffers[name] = rounded = stored.to(dtype)
            replaced[name] = stored, rounded

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def restore(*_: Any) -> None:
        for name, (stored, rounded) in replaced.items():
            value: Any = module._buffers[name]
            if value is not rounded or rounded._version:  # the call has written it
                stored.copy_(value)
            module._buffers[name] = stored

    if names:
        module.register_forward_pre_hook(replace)
        module.register_forward_hook(restore, always_call=True)


class CountedAllGather(DefaultAllGather):
    """Gathers the weights of a block, and counts what training steps send for it."""

    def __init__(self, module: nn.Module, comm: Communication) -> None:
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

    def __init__(self, comm: Communication) -> None:
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


def count_bytes_(module: nn.Module, mesh: DeviceMesh) -> Communication:
    """Count the bytes of gradients and weights that a sharded module sends in training steps."""
    comm = Communication()
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


def prefetch_(blocks: Sequence[Any], ahead: Prefetch) -> None:
    """Let each sharded block gather the weights of the next ones while it computes."""
    # Results are right for any order in which the model calls its blocks; this one saves time.
    for index, block in enumerate(blocks):
        if ahead.forward:
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + ahead.forward])
        if ahead.backward:
            before = blocks[max(0, index - ahead.backward) : index]
            block.set_modules_to_backward_prefetch(before[::-1])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
