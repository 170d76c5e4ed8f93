"""`Strategy`: how processes share a model, one subclass for each way; and their samples."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from compress.common.errors import StageFailed
from compress.common.process import derive_seed
from compress.training.checkpoint import STATE, Tensors, read_
from compress.training.optim.optimizer import build_optimizer, clip_norm_
from compress.training.optim.transformer_blocks import compile_

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.optim import Optimizer

    from compress.artifacts.eager_model import EagerModel
    from compress.data.batch import Batch
    from compress.training.config.training import Training
    from compress.training.distributed.gradient_compression import Communication
    from compress.training.model_parallel.pipeline_parallel import PipelineRunner

# Rank 0 may take hours to compute a metric, while the others wait in a collective of gloo; a dead
# process is noticed at once by its closed connection, not by this timeout.
PATIENCE = timedelta(hours=24)
# NCCL's collectives are those of training steps, and notice a dead process by the timeout alone.
# Long enough for one rank to compile the model, which the others wait for in the first step.
NCCL_PATIENCE = timedelta(minutes=30)
# `state.<weight>.<entry>`, which does not depend on how the optimizer is sharded or grouped.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


Example: TypeAlias = "Callable[[], Batch]"
"""Returns a few samples, the same in every process."""


class Strategy:
    """What the training loop needs of other processes; here, one process with the whole model."""

    # Every rank makes every call, because many of them are collectives.
    rank: int = 0
    """Index of the share of each batch that this process computes."""
    ranks: int = 1
    """Number of shares into which each batch is divided."""
    processes: int = 1
    """Number of all processes, several of which may work on one share."""
    group: dist.ProcessGroup | None = None
    """Processes with copies of the same weights, one for each share; None for all."""
    is_main: bool = True
    """Whether this is the one process that writes and logs what all have in common."""
    rng_stream: int = 0
    """Index of this process's random numbers; processes that repeat each other's work share it."""
    pipeline: PipelineRunner | None = None
    """Runs forward and backward passes through pipeline stages; None without pipeline stages."""
    communication: Communication | None = None
    """How gradients are averaged and their bytes counted; None where a library does it itself."""

    def load(self, model: EagerModel, device: str) -> nn.Module:
        """Load the module to train; one that `wrap` will shard may still lack its weights."""
        return model.load(device)

    def synchronize_batch_norm_(self, module: nn.Module) -> None:
        """Let BatchNorm see the samples of all processes where the settings ask for it."""

    def wrap(self, module: nn.Module, training: Training, example: Example) -> nn.Module:
        """Return the module to call in training, compiled, sharded (in place) or wrapped."""
        compile_(module, training)
        return module

    def optimizer(self, module: nn.Module, training: Training) -> Optimizer:
        """Build the optimizer of a wrapped module."""
        return build_optimizer(module, training)

    def loss_scaler(self, training: Training, device: str) -> torch.amp.GradScaler:
        """Return what scales the loss of `fp16`; at other precisions it passes all through."""
        is_fp16 = training.precision == "fp16"
        return torch.amp.GradScaler(torch.device(device).type, enabled=is_fp16)

    def gradient_sync(self, wrapped: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch; gradients are exchanged in the last one's."""
        return nullcontext()

    def backward(self, wrapped: nn.Module, loss: torch.Tensor) -> None:
        """Compute the gradients of a micro-batch and accumulate them."""
        torch.autograd.backward(loss)

    def reduce_gradients_(self, module: nn.Module) -> None:
        """Exchange gradients that no backward hook has exchanged, after the last micro-batch."""

    def clip_grad_norm_(self, module: nn.Module, largest: float | None) -> torch.Tensor | None:
        """Scale all gradients, in place, so that their norm over all stages is at most a limit.

        Returns the norm from before; without a limit, that is all. None if it is not known.
        """
        global_norm = self.pipeline.global_norm if self.pipeline else None
        return clip_norm_(module.parameters(), largest, global_norm)

    def model_tensors(self, module: nn.Module) -> Tensors:
        """Return weights and buffers, or this process's shards of them."""
        return cast("Tensors", get_model_state_dict(module))

    def load_model_(self, module: nn.Module, tensors: Tensors) -> None:
        """Load weights and buffers into the module, in place."""
        set_model_state_dict(module, dict(tensors))

    def optimizer_tensors(self, module: nn.Module, optimizer: Optimizer) -> Tensors:
        """Return the optimizer's state, or this process's shards, as `state.<weight>.<entry>`."""
        flat: dict[str, Any] = get_optimizer_state_dict(module, optimizer, options=BY_NAME)
        # Without the options of the parameter groups, which follow from the settings.
        return {
            name: value
            for name, value in flat.items()
            if name.startswith(STATE) and isinstance(value, torch.Tensor)
        }

    def load_optimizer_(self, module: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
        """Load the optimizer's state from a checkpoint, in place."""
        state = get_optimizer_state_dict(module, optimizer, options=BY_NAME)
        tensors = {name: state[name] for name in self.optimizer_tensors(module, optimizer)}
        missing = read_(checkpoint, {"optimizer": tensors})
        set_optimizer_state_dict(module, optimizer, {**state, **tensors}, options=BY_NAME)
        # A weight without a gradient so far has no state, but get_optimizer_state_dict created one.
        names = {name.removeprefix(STATE).rpartition(".")[0] for name in missing}
        for name, weight in module.named_parameters():
            if name in names:
                optimizer.state.pop(weight, None)

    def all_reduce_(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Start to sum a tensor over shares, in place, on all ranks; return what waits for it."""
        if self.ranks == 1:
            return lambda: None
        work: Any = dist.all_reduce(tensor, group=self.group, async_op=True)
        return cast("Callable[[], object]", work.wait)

    def sum_over_ranks(self, values: Sequence[float]) -> list[float]:
        """Sum each number over the shares of the batch; all ranks get the sums."""
        sums = torch.tensor(values, dtype=torch.float64)
        self.all_reduce_(sums)()
        return [float(value) for value in sums]

    def gather_shares(self, value: Any) -> list[Any] | None:
        """Gather every share's value on the processes of the first share; the others get None."""
        values = None if self.rank else [value] * self.ranks
        if self.ranks > 1:
            dist.gather_object(value, values, group=self.group, group_dst=0)
        return values

    def gather_all(self, value: Any) -> list[Any] | None:
        """Gather every process's value on the main process; the others get None."""
        values = [value] * self.processes if self.is_main else None
        if self.processes > 1:
            dist.gather_object(value, values)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the main process's value in all processes."""
        values = [value]
        if self.processes > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def broadcast_buffers_(self, module: nn.Module) -> None:
        """Overwrite the buffers of all copies of the module by those of the first copy."""
        for buffer in module.buffers() if self.ranks > 1 else ():
            dist.broadcast(buffer, group=self.group, group_src=0)

    def release_buffers_(self, module: nn.Module) -> None:
        """Free the weights that evaluating a sharded module has gathered."""

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.processes > 1:
            dist.barrier()

    def sent_bytes(self, steps: int) -> int | None:
        """Return the bytes that this process sent per step since the last call; None if unknown."""
        return self.communication.sent_bytes(steps) if self.communication else None

    def sent_between_bytes(self, steps: int) -> int | None:
        """Return how many of them left the process's group; None without groups."""
        return self.communication.sent_between_bytes(steps) if self.communication else None

    def save_local(self, checkpoint: Path) -> None:
        """Write state that only this process has, such as residuals of compressed gradients."""
        if self.communication:
            self.communication.save(checkpoint)

    def load_local(self, checkpoint: Path) -> None:
        """Load what this process wrote by `save_local`."""
        if self.communication:
            self.communication.load(checkpoint)


def visible_devices(device: str) -> list[int]:
    """Return the CUDA devices that DataParallel uses, the given one first; none for a CPU."""
    if not device.startswith("cuda"):
        return []
    own = torch.device(device).index or 0
    return [own, *(index for index in range(torch.cuda.device_count()) if index != own)]


def check_replicable(training: Training, devices: int) -> None:
    """Refuse settings that do not work in DataParallel's threads, with several devices."""
    found = {
        # These call the original module's forward, whose weights are on the first device.
        f"compile: {training.compile}": training.compile != "none",
        f"activation_checkpointing: {training.activation_checkpointing}": (
            training.activation_checkpointing != "none"
        ),
        # torch 2.13 passes on that there is autocast, and not its dtype: fp16 in all threads.
        "precision: bf16": training.precision == "bf16",
    }
    for name, is_set in found.items():
        if is_set and devices > 1:
            raise StageFailed(
                f"strategy: dp over {devices} devices does not go with {name}; use strategy: ddp "
                f"with processes: {devices}, or leave it out"
            )


class DataParallelStrategy(Strategy):
    """One process whose threads compute a share of each batch on every CUDA device."""

    def __init__(self, devices: list[int]) -> None:
        self.devices = devices

    def wrap(self, module: nn.Module, training: Training, example: Example) -> nn.Module:
        """Wrap the module in DataParallel, which copies it to all devices in every step."""
        if any(part._forward_hooks for part in module.modules()):
            raise StageFailed(
                f"strategy: dp over {len(self.devices)} devices does not go with losses that read "
                "a module's outputs by hooks, which threads would overwrite; use strategy: ddp"
            )
        return nn.DataParallel(module, device_ids=self.devices)

    def gradient_sync(self, wrapped: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """Seed all devices for a micro-batch; the training loop seeds the first one alone."""
        seed = int(torch.randint(2**62, ()))
        for index, generator in enumerate(torch.cuda.default_generators):
            generator.manual_seed(seed + index)
        return nullcontext()


def wait_for_hours_on_cpu(group: dist.ProcessGroup | None) -> None:
    """Give a group's collectives on CPU tensors their timeout, and leave NCCL's as it is."""
    assert group is not None
    group._get_backend(torch.device("cpu"))._set_default_timeout(PATIENCE)


@contextmanager
def process_group(device: str, store: Store | None = None) -> Iterator[None]:
    """Join the process group of the environment's RANK and WORLD_SIZE for a block."""
    # Gloo beside NCCL: metrics, losses and checkpoints are exchanged from main memory.
    on_cuda = device.startswith("cuda")
    backend = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    # Without a store the ranks meet at MASTER_ADDR and MASTER_PORT.
    dist.init_process_group(
        backend,
        timeout=NCCL_PATIENCE if on_cuda else PATIENCE,
        store=store,
        rank=rank,
        world_size=world_size,
    )
    wait_for_hours_on_cpu(dist.group.WORLD)
    # No `finally`: a rank that failed must not wait here for the others.
    yield
    dist.destroy_process_group()


BATCHES_PER_POOL = 50
"""Batches whose samples are sorted by length together: enough for little padding, few enough that
the batches still differ from epoch to epoch."""


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Return the number of full batches, at least one."""
    return max(1, samples // batch_size)


def share_of_epoch(
    samples: int,
    batch_size: int,
    seed: int,
    epoch: int,
    rank: int,
    ranks: int,
    lengths: Sequence[int] | None = None,
) -> Sequence[int]:
    """Return the indices of the samples that a rank reads in an epoch, in order.

    All ranks shuffle alike, and each takes every ``ranks``-th sample, so that a step's samples are
    the same for any number of ranks. With ``lengths``, samples of similar length share a batch.
    """
    # The order depends only on seed and epoch, so that a run resumed at any step reads the samples
    # that an uninterrupted one reads.
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    # An array: 8 bytes an index, where a list of Python's integers takes 36.
    order: Sequence[int] = array(
        "q", torch.randperm(samples, generator=generator).numpy().tobytes()
    )
    # Without an incomplete last batch every step has equal shares without duplicates (torch's
    # DistributedSampler repeats samples), and BatchNorm never meets a batch of one sample.
    used = min(steps_per_epoch(samples, batch_size) * batch_size, samples - samples % ranks)
    if lengths:
        order = bucket_by_length(order[:used], lengths, batch_size, generator)
    return order[rank:used:ranks]


def bucket_by_length(
    order: Sequence[int], lengths: Sequence[int], batch_size: int, generator: torch.Generator
) -> list[int]:
    """Reorder shuffled samples so that those of a batch have similar lengths."""
    # Pools of many batches are sorted by length and cut into batches, which are shuffled again.
    pool = BATCHES_PER_POOL * batch_size
    in_batches = len(order) - len(order) % batch_size
    by_length = [
        sample
        for start in range(0, in_batches, pool)
        for sample in sorted(order[start : min(start + pool, in_batches)], key=lengths.__getitem__)
    ]
    shuffled = torch.randperm(in_batches // batch_size, generator=generator).tolist()
    batches = [by_length[b * batch_size : (b + 1) * batch_size] for b in shuffled]
    return [sample for batch in (*batches, order[in_batches:]) for sample in batch]
