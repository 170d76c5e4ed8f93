"""Tensor and pipeline parallelism combined with data parallelism, on a mesh of processes."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from compress.common.errors import StageFailed
from compress.training.distributed.base import wait_for_hours_on_cpu
from compress.training.distributed.fsdp import FSDPStrategy, blocks_to_wrap, shard_
from compress.training.model_parallel.equivalence_check import ReferenceRun, first_and_count
from compress.training.model_parallel.pipeline_schedule import PipelineRunner
from compress.training.model_parallel.pipeline_split import split_into_parts
from compress.training.model_parallel.tensor_parallel import apply_tensor_parallel_
from compress.training.optim.compile import compile_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from compress.artifacts.eager_model import EagerModel
    from compress.data.batch import Batch
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Training


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

    def load(self, model: EagerModel, device: str) -> nn.Module:
        """Load the module with its weights, to compare the divided module with the whole one."""
        return model.load(device)

    def wrap(
        self, module: nn.Module, training: Training, example: Callable[[], Batch]
    ) -> nn.Module:
        """Divide the module in place, and compare outputs and gradients with the whole one's."""
        reference = ReferenceRun.record(module, example().inputs)
        settings = self.parallel.pipeline
        partition = split_into_parts(module, settings, reference.inputs) if settings else None
        if self.parallel.tensor > 1:  # first, so that FSDP then shards each slice
            self.partial_gradients = apply_tensor_parallel_(
                module, self.parallel, self.mesh["tensor"], reference
            )
        if settings and partition:
            group = self.mesh["pipeline"].get_group()
            self.pipeline = PipelineRunner(module, partition, settings, group)
            tied = self.pipeline.tied_stages
            # Gradients of slices or shards in several stages cannot be summed.
            if tied and (self.parallel.sharding_mode or self.parallel.tensor > 1):
                raise StageFailed(
                    f"parallel.pipeline: several stages use the weight {first_and_count(tied)}, "
                    "which works with strategy: ddp, and without tensor"
                )
            self.pipeline.check_equivalence(reference)
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
        for bucket in buckets(gradients, self.parallel.bucket_mebibytes or 25):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self.group)
            flat.div_(self.ranks)
            sizes = [gradient.numel() for gradient in bucket]
            for gradient, mean in zip(bucket, torch.split(flat, sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def buckets(tensors: Sequence[torch.Tensor], mebibytes: float) -> Iterator[list[torch.Tensor]]:
    """Group tensors of the same dtype into buckets of about a size."""
    # torch.cat promotes tensors of several dtypes to one.
    by_type = sorted(tensors, key=lambda t: str(t.dtype))
    for _, same in groupby(by_type, key=lambda t: t.dtype):
        bucket: list[torch.Tensor] = []
        for tensor in same:
            bucket.append(tensor)
            if sum(t.nbytes for t in bucket) >= mebibytes * 2**20:
                yield bucket
                bucket = []
        if bucket:
            yield bucket
