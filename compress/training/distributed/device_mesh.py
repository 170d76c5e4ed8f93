"""Meshes: processes that share one model, by its matrices and its blocks, and copies of these."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from compress.common.errors import StageFailed
from compress.training.distributed.fsdp import FSDPStrategy, blocks_to_wrap, shard_
from compress.training.model_parallel.equivalence_check import Proof
from compress.training.model_parallel.pipeline_schedule import Pipe
from compress.training.model_parallel.pipeline_split import partition_of
from compress.training.model_parallel.tensor_parallel import apply_tensor_parallel_
from compress.training.optim.clip_grad import clip_norm_
from compress.training.optim.compile import compile_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

    from compress.artifacts.eager_model import EagerModel
    from compress.data.splits import Batch
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Training
    from compress.training.loop.train_state import TrainState


class DeviceMeshStrategy(FSDPStrategy):
    """Processes by stage of the pipeline, by share of the batch, and by share of each matrix.

    All processes of one share of the batch read the same samples. Those of one stage draw the same
    random numbers: what they compute alike, dropout included, stays alike.
    """

    def __init__(self, parallel: Parallel) -> None:
        """Take part in the process group, which has been joined."""
        super().__init__(parallel)
        stages = parallel.pipeline.stages if parallel.pipeline else 1
        shape = (stages, self.ranks // parallel.model_ranks, parallel.tensor)
        device = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        self.mesh = init_device_mesh(device, shape, mesh_dim_names=("pipeline", "data", "tensor"))
        self.group = self.mesh["data"].get_group()
        self.rank, self.ranks = self.mesh["data"].get_local_rank(), shape[1]
        self.rng_stream = self.rank + self.ranks * self.mesh["pipeline"].get_local_rank()
        self.pipe: Pipe | None = None
        self.partial: list[str] = []
        """Weights whose gradients are to be added up over the processes of `tensor`."""

    def load(self, model: EagerModel, device: str) -> nn.Module:
        """Return the module with its weights: the parts are compared with the whole."""
        return model.load(device)

    def wrap(
        self, module: nn.Module, training: Training, example: Callable[[], Batch]
    ) -> nn.Module:
        """Spread the module in place, prove that it still answers as the whole, and return it.

        Raises:
            StageFailed: it cannot be spread so, or does not answer as the whole one.
        """
        proof = Proof.of(module, example().inputs)
        pipeline = self.parallel.pipeline
        partition = partition_of(module, pipeline, proof.inputs) if pipeline else None
        if self.parallel.tensor > 1:
            self.partial = apply_tensor_parallel_(module, self.parallel, self.mesh["tensor"], proof)
        if pipeline and partition:
            self.pipe = Pipe(module, partition, pipeline, self.mesh["pipeline"].get_group())
            self.pipe.refuse_ties(self.parallel)
            with self.pipe.listening():
                self.pipe.prove(proof)
        compile_(module, training)
        if self.parallel.sharding_mode:
            shard_(module, self._blocks(module), training, self.mesh["data"])
        if self.pipe:
            self.pipe.listen()  # after FSDP's own hooks are there, and before them
        return module

    def optimizer(self, module: nn.Module, training: Training) -> torch.optim.Optimizer:
        """Return the optimizer of this process's part.

        Raises:
            StageFailed: the part has nothing to train.
        """
        if self.pipe and not any(weight.requires_grad for weight in module.parameters()):
            raise StageFailed(
                f"parallel.pipeline: stage {self.pipe.stage} has no weights that require "
                "gradients; choose pipeline.split so that each stage has some"
            )
        return super().optimizer(module, training)

    @contextmanager
    def micro_step(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Compute a part of a step; gradients are exchanged after the last."""
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(last)
        yield
        if last:
            self._exchange(wrapped)

    def accumulate_gradients(self, learner: TrainState, batches: Sequence[Batch]) -> float:
        """Compute the gradients of a step, through the pipeline where there is one."""
        if self.pipe is None:
            return super().accumulate_gradients(learner, batches)
        (batch,) = batches
        value = self.pipe.step(batch.to(learner.device), learner.loss, learner.autocast)
        self._exchange(learner.module)
        return value

    def clip_(self, module: nn.Module, largest: float) -> None:
        """Scale all gradients, in place, so that their norm over all stages is in a limit."""
        clip_norm_(module.parameters(), largest, self.pipe.whole_norm if self.pipe else None)

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of numbers over the shares of the batch."""
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums, group=self.group)
        return [float(value) for value in sums]

    def gather(self, value: Any) -> list[Any] | None:
        """Return every share's value on the processes of the first share, and None on others."""
        values: list[Any] | None = None if self.rank else [None] * self.ranks
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values

    def share_buffers_(self, module: nn.Module) -> None:
        """Give all copies of a stage the first one's buffers, in place."""
        for buffer in module.buffers():
            dist.broadcast(buffer, group=self.group, group_src=0)

    def _blocks(self, module: nn.Module) -> list[nn.Module]:
        """Return the parts of a module that are gathered one at a time, inner ones first."""
        blocks = blocks_to_wrap(module, self.parallel)
        held = [block for block in blocks if next(block.parameters(), None) is not None]
        return self.pipe.left_by_their_end(held) if self.pipe else held

    def _exchange(self, module: nn.Module) -> None:
        """Make gradients whole, in place: over heads, over stages, and over shares of the batch."""
        weights = dict(module.named_parameters())
        for name in self.partial:
            gradient = weights[name].grad if name in weights else None
            if gradient is not None:
                dist.all_reduce(local(gradient), group=self.mesh["tensor"].get_group())
        if self.pipe:
            self.pipe.add_up_ties(weights)
        if self.parallel.sharding_mode is None and self.ranks > 1:
            self._average([w for w in weights.values() if w.requires_grad])

    def _average(self, weights: list[nn.Parameter]) -> None:
        """Average gradients over the copies, in place, in buckets; nobody's stay nobody's."""
        used = torch.tensor([int(w.grad is not None) for w in weights], dtype=torch.int32)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self.group)
        gradients = []
        for weight, is_used in zip(weights, used.tolist(), strict=True):
            if is_used and weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if weight.grad is not None:
                gradients.append(local(weight.grad))
        for bucket in buckets(gradients, self.parallel.bucket_mebibytes):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self.group)
            flat.div_(self.ranks)
            sizes = [gradient.numel() for gradient in bucket]
            for gradient, mean in zip(bucket, torch.split(flat, sizes), strict=True):
                gradient.copy_(mean.view_as(gradient))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor, in its own memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def buckets(tensors: Sequence[torch.Tensor], mebibytes: float) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one dtype together, about so much at once."""
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
