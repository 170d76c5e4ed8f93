"""Data parallelism: every process has a share of each batch; DDP, ZeRO stage 1, DeepSpeed."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from compress.checkpoint.distributed_checkpoint import read_distributed
from compress.common.errors import StageFailed, first_line
from compress.common.forward import preserve_modes
from compress.common.process import seeded
from compress.training.checkpoint import STATE, Tensors
from compress.training.distributed.base import Example, Strategy
from compress.training.distributed.gradient_compression import average_gradients_
from compress.training.model_parallel.pipeline_parallel import leaves_between
from compress.training.optim.optimizer import (
    build_optimizer,
    explain_rejected_arguments,
    optimizer_arguments,
    optimizer_class,
    parameter_groups,
)
from compress.training.optim.transformer_blocks import compile_

if TYPE_CHECKING:
    from compress.data.batch import Batch
    from compress.training.config.parallel import Parallel
    from compress.training.config.training import Training

RUNNING_MEAN = "running_mean"  # last part of the name of a buffer that BatchNorm keeps


def synchronize_batch_norm_(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Let each BatchNorm of a module share statistics with a process group, in place.

    Classes, names and hooks of the layers stay; in eval mode nothing changes.
    """
    # Not `SyncBatchNorm.convert_sync_batchnorm`, which puts other modules in their place: hooks
    # that an objective has registered would be lost. Its `forward` is used, though, where torch has
    # the kernels.
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    if not layers and any(name.endswith(RUNNING_MEAN) for name, _ in module.named_buffers()):
        raise StageFailed(
            "parallel.sync_batchnorm: the model has running statistics but no BatchNorm layer of "
            "torch.nn, as in the exported graph of quantization-aware training; leave it out"
        )
    for layer in layers:
        # `Any`: attributes that SyncBatchNorm.forward reads, and a method of one instance.
        synchronized: Any = layer
        synchronized.process_group = group
        synchronized.forward = MethodType(synchronized_forward, layer)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives are not compiled
def synchronized_forward(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Normalize a layer's inputs; in training mode by the statistics of all processes."""
    if inputs.is_cuda:
        outputs: torch.Tensor = nn.SyncBatchNorm.forward(layer, inputs)
        return outputs
    if not layer.training:
        return type(layer).forward(layer, inputs)  # type: ignore[no-any-return]
    layer._check_input_dim(inputs)
    outputs, mean, variance, samples = SynchronizedNorm.apply(  # type: ignore[no-untyped-call]
        inputs, layer.weight, layer.bias, layer.eps, layer.process_group
    )
    if layer.track_running_stats:
        layer.num_batches_tracked.add_(1)
        # As torch's BatchNorm: without a momentum, the mean over all batches so far.
        share = layer.momentum
        share = 1.0 / float(layer.num_batches_tracked) if share is None else share
        unbiased = variance * (samples / (samples - 1))
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), share)
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), share)
    return outputs


class SynchronizedNorm(torch.autograd.Function):
    """Batch normalization over a process group, for the CPU; torch's SyncBatchNorm needs CUDA.

    As there, gradients of weight and bias are this process's own, which data parallelism averages.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return outputs, and mean, biased variance and number of values of each channel."""
        # At least float32, whatever the inputs have, and as in one process for float64.
        values = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        axes = [axis for axis in range(values.dim()) if axis != 1]
        own_variance, own_mean = torch.var_mean(values, axes, correction=0)
        own_samples = values.new_tensor([values.numel() // values.shape[1]])
        own = torch.cat([own_mean, own_variance, own_samples])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        # Without a difference of squares, which loses digits: Chan et al., "Updating Formulae and a
        # Pairwise Algorithm for Computing Sample Variances" (1979).
        channels = values.shape[1]
        means, variances, counts = torch.split(torch.stack(parts), [channels, channels, 1], dim=1)
        samples = counts.sum()
        mean = (means * counts).sum(0) / samples
        variance = ((variances + (means - mean).square()) * counts).sum(0) / samples

        shape = [1, channels, *[1] * (values.dim() - 2)]
        normalized = (values - mean.view(shape)) * torch.rsqrt(variance + eps).view(shape)
        outputs = normalized if weight is None else normalized * weight.view(shape)
        outputs = outputs if bias is None else outputs + bias.view(shape)
        ctx.save_for_backward(normalized, weight, torch.rsqrt(variance + eps), samples)
        ctx.group, ctx.axes, ctx.shape = group, axes, shape
        ctx.mark_non_differentiable(mean, variance, samples)
        return outputs.to(inputs.dtype), mean, variance, samples

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of inputs, weight and bias."""
        normalized, weight, inverse_deviation, samples = ctx.saved_tensors
        upstream = gradient.to(normalized.dtype)
        sum_upstream = upstream.sum(ctx.axes)
        sum_product = (upstream * normalized).sum(ctx.axes)
        grad_inputs = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([sum_upstream, sum_product])
            dist.all_reduce(sums, group=ctx.group)
            of_mean, of_deviation = (sums / samples).view(2, *ctx.shape)
            scale = inverse_deviation if weight is None else inverse_deviation * weight
            grad_inputs = (upstream - of_mean - normalized * of_deviation) * scale.view(ctx.shape)
            grad_inputs = grad_inputs.to(gradient.dtype)
        grad_weight = sum_product if ctx.needs_input_grad[1] else None
        grad_bias = sum_upstream if ctx.needs_input_grad[2] else None
        return grad_inputs, grad_weight, grad_bias, None, None


DRAWS = 8
"""Calls of a model in search of unused weights: layers that are left out at random (LayerDrop) are
then found with near certainty."""


class DDPStrategy(Strategy):
    """DistributedDataParallel: gradients are averaged (Li et al., "PyTorch Distributed", 2020)."""

    def __init__(self, parallel: Parallel) -> None:
        self.parallel = parallel
        self.rank = self.rng_stream = dist.get_rank()
        self.ranks = self.processes = dist.get_world_size()
        self.is_main = self.rank == 0
        self.is_first_micro_batch = True
        self.expects_all_gradients = False
        """Whether DDP waits for the gradients of all weights in each step."""

    def synchronize_batch_norm_(self, module: nn.Module) -> None:
        """Let BatchNorm see a step's samples on all copies of the module."""
        if self.parallel.sync_batchnorm and self.ranks > 1:
            synchronize_batch_norm_(module, self.group)

    def wrap(self, module: nn.Module, training: Training, example: Example) -> nn.Module:
        """Wrap the module in DistributedDataParallel, which also broadcasts rank 0's buffers."""
        # Models with a head that the loss does not reach are common (a pooler, say).
        find_unused = self.parallel.find_unused_parameters
        if find_unused == "auto":
            misses = not self.parallel.static_graph and bool(unused_weights(module, example()))
            find_unused = bool(self.sum_over_ranks([misses])[0])
        self.expects_all_gradients = not find_unused and not self.parallel.static_graph
        wrapped = DistributedDataParallel(
            module,
            bucket_cap_mb=self.parallel.bucket_mebibytes,
            find_unused_parameters=find_unused,
            gradient_as_bucket_view=self.parallel.gradient_as_bucket_view,
            static_graph=self.parallel.static_graph,
        )
        if self.expects_all_gradients:
            # After its first backward pass DDP sorts gradients into other buckets, in which more
            # than two processes sum in another order. Taken here, it is in no step, and so a
            # resumed training has the buckets of an uninterrupted one.
            with preserve_modes(module), seeded(0, str(next(module.parameters()).device)):
                outputs = _call_in_training(wrapped, example())
                torch.autograd.backward([out.sum() for out in outputs if out.requires_grad])
            self.reduce_gradients_(module)
            module.zero_grad()
        # After it, or the few samples would be what the model is compiled for.
        compile_(module, training)
        self.communication = average_gradients_(wrapped, self.parallel)
        return wrapped

    def gradient_sync(self, wrapped: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """All-reduce gradients in the last micro-batch; with a static graph also in the first."""
        # DDP learns a static graph in the very first backward, and asserts that it all-reduces
        # there. Then so does the first of each step, or a resumed training would add up the
        # gradients in another order.
        exchange = is_last or (self.parallel.static_graph and self.is_first_micro_batch)
        self.is_first_micro_batch = is_last
        return nullcontext() if exchange else wrapped.no_sync()  # type: ignore[operator]  # a DistributedDataParallel

    def reduce_gradients_(self, module: nn.Module) -> None:
        """Refuse a step without the gradients for which all other processes wait."""
        if not self.expects_all_gradients:
            return
        for name, weight in module.named_parameters():
            if weight.requires_grad and weight.grad is None:
                raise StageFailed(
                    f"the loss does not reach the weight {name!r} in every step; set "
                    "parallel.find_unused_parameters: true"
                )


class Zero1Strategy(DDPStrategy):
    """Every rank has the whole model, and the optimizer state of some of its weights.

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2019), section 5.1.
    """

    def optimizer(self, module: nn.Module, training: Training) -> Optimizer:
        """Build an optimizer that steps its share of the weights and broadcasts them."""
        groups = parameter_groups(module, training)
        self.weight_bytes: int = sum(p.nbytes for group in groups for p in group["params"])
        from torch.distributed.optim import ZeroRedundancyOptimizer

        with explain_rejected_arguments(training):
            return ZeroRedundancyOptimizer(
                groups, optimizer_class=optimizer_class(training), **optimizer_arguments(training)
            )

    def sent_bytes(self, steps: int) -> int | None:
        """Return the bytes of gradients, and of the weights that each process broadcasts."""
        # Each process sends the weights it has stepped; their mean, as shares differ by a weight.
        return (super().sent_bytes(steps) or 0) + self.weight_bytes * (self.ranks - 1) // self.ranks

    def optimizer_tensors(self, module: nn.Module, optimizer: Optimizer) -> Tensors:
        """Gather the state on rank 0, in the format of all strategies."""
        # torch.distributed.checkpoint refuses ZeroRedundancyOptimizer's own state.
        sharded: Any = optimizer
        sharded.consolidate_state_dict(to=0)
        if not self.is_main:
            return {}
        names = _names(module, optimizer)
        return {
            f"{STATE}{names[index]}.{what}": value
            for index, state in sharded.state_dict()["state"].items()
            for what, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def load_optimizer_(self, module: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
        """Read the whole state; ``load_state_dict`` keeps this process's share of it."""
        saved = read_distributed(checkpoint).get("optimizer", {})
        indices = {name: index for index, name in enumerate(_names(module, optimizer))}
        weights = dict(module.named_parameters())
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, stored in saved.items():
            weight, _, what = name.removeprefix(STATE).rpartition(".")
            value = stored.read()
            # In the weight's memory format: fused optimizers pair elements by their places.
            if value.shape == weights[weight].shape:
                layout = torch.empty_like(weights[weight], dtype=value.dtype, device=value.device)
                value = layout.copy_(value)
            state.setdefault(indices[weight], {})[what] = value
        # Not its own `state_dict`, which wants the state gathered; groups have weights by number.
        groups = Optimizer.state_dict(optimizer)["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


SHARDS = "deepspeed"  # folder in a checkpoint, in the engine's own format
TAG = "engine"


class DeepSpeedStrategy(DDPStrategy):
    """Every rank drives a DeepSpeed engine, which holds its shards.

    After Rajbhandari et al., "ZeRO" (2019), and Ren et al., "ZeRO-Offload" (2021).
    """

    engine: Any

    def wrap(self, module: nn.Module, training: Training, example: Example) -> nn.Module:
        """Return a DeepSpeed engine around the module; stage 3 shards the module in place."""
        compile_(module, training)
        device = next(module.parameters()).device.type
        # DeepSpeed reads this once, when it is first imported.
        os.environ.setdefault("DS_ACCELERATOR", device)
        import deepspeed

        self.engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=build_optimizer(module, training),
            config=deepspeed_configuration(self.parallel, training, self.ranks),
            dist_init_required=False,
        )
        wrapped: nn.Module = self.engine
        return wrapped

    def optimizer(self, module: nn.Module, training: Training) -> Optimizer:
        """Return an optimizer whose ``step()`` is the engine's."""
        return EngineOptimizer(self.engine)

    def loss_scaler(self, training: Training, device: str) -> torch.amp.GradScaler:
        """Return one that leaves the loss to the engine, and saves and restores its scale."""
        if training.precision != "fp16":
            return super().loss_scaler(training, device)
        # The engine scales in `backward` and unscales in `step`; its checkpoints lack the scale.
        scaler = torch.amp.GradScaler(torch.device(device).type, enabled=False)
        of_stage_0 = self.engine.torch_autocast_z0_gradscaler
        own: Any = of_stage_0 or self.engine.optimizer.torch_autocast_gradscaler
        for name in ("get_scale", "state_dict", "load_state_dict"):
            setattr(scaler, name, getattr(own, name))
        return scaler

    def gradient_sync(self, wrapped: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """Mark the last micro-batch, after which the engine reduces gradients."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, wrapped: nn.Module, loss: torch.Tensor) -> None:
        """Compute gradients by the engine, which in stage 0 would otherwise miss them."""
        self.engine.backward(loss)

    def clip_grad_norm_(self, module: nn.Module, largest: float | None) -> None:
        """Do nothing: the engine clips in its step, where it knows the norm over all shards."""

    def model_tensors(self, module: nn.Module) -> Tensors:
        """Gather copies of the module's weights and buffers."""
        gathered: AbstractContextManager[None] = nullcontext()
        if self.parallel.zero_stage == 3:
            import deepspeed

            gathered = deepspeed.zero.GatheredParameters(list(module.parameters()))
        with gathered:
            return {n: t.detach().cpu().clone() for n, t in module.state_dict().items()}

    def load_model_(self, module: nn.Module, tensors: Tensors) -> None:
        """Do nothing: the engine loads its weights together with the optimizer's state."""

    def optimizer_tensors(self, module: nn.Module, optimizer: Optimizer) -> Tensors:
        """Return nothing: the engine writes its own state, see :meth:`save_local`."""
        return {}

    def load_optimizer_(self, module: nn.Module, optimizer: Optimizer, checkpoint: Path) -> None:
        """Load the engine's weights and optimizer state, written by as many processes."""
        reason = "it has no state of DeepSpeed's"
        # The engine's state is in DeepSpeed's own format, which only the same number of processes
        # can load. It is a pickle, and is read from the training's own folder only.
        try:
            loaded, _ = self.engine.load_checkpoint(str(checkpoint / SHARDS), tag=TAG)
        except (AssertionError, RuntimeError, OSError, KeyError) as error:
            loaded, reason = None, first_line(error)
        if loaded is None:
            raise StageFailed(
                f"checkpoint {checkpoint} cannot be resumed by strategy: deepspeed with "
                f"{self.ranks} processes ({reason}); resume with the settings it was written "
                f"with, or remove {checkpoint.parent} to train anew"
            )

    def save_local(self, checkpoint: Path) -> None:
        """Write the engine's shards into a checkpoint."""
        self.engine.save_checkpoint(str(checkpoint / SHARDS), tag=TAG, save_latest=False)


class EngineOptimizer(Optimizer):
    """An optimizer whose ``step()`` is a DeepSpeed engine's."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the engine's optimizer, to set the learning rate."""
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears gradients in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip and step by the engine."""
        self.engine.step()


def deepspeed_configuration(parallel: Parallel, training: Training, ranks: int) -> dict[str, Any]:
    """Translate our settings into DeepSpeed's configuration."""
    zero: dict[str, Any] = {"stage": parallel.zero_stage}
    if parallel.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu"}
        if parallel.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    more: dict[str, Any] = dict(parallel.deepspeed_config)
    zero |= more.pop("zero_optimization", {})
    config: dict[str, Any] = {
        # The training loop counts micro-batches, marks the last and weighs their losses itself.
        "train_micro_batch_size_per_gpu": training.batch_size // ranks,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": training.clip_norm or 0.0,
        "zero_optimization": zero,
        # torch.optim's own: DeepSpeed's would be compiled with a C++ compiler at the first use.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,  # never: progress is reported by epoch
    }
    if dtype := {"bf16": "bfloat16", "fp16": "float16"}.get(training.precision):
        config["torch_autocast"] = {"enabled": True, "dtype": dtype}
    return config | more


def unused_weights(module: nn.Module, example: Batch) -> set[str]:
    """Return the trained weights that the outputs do not depend on in one of several calls.

    Buffers, modes and random numbers stay as they are.
    """
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    device = next(module.parameters()).device
    unused: set[str] = set()
    with preserve_modes(module), seeded(0, str(device)), torch.enable_grad():
        for _ in range(DRAWS):
            outputs = _call_in_training(module, example)
            reached = set(leaves_between(None, [output.grad_fn for output in outputs]))
            unused |= {name for name, weight in weights.items() if weight not in reached}
    return unused


def _call_in_training(module: nn.Module, example: Batch) -> list[torch.Tensor]:
    # What buffers become is lost.
    module.train()
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    outputs = functional_call(module, buffers, example.inputs)
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _names(module: nn.Module, optimizer: Optimizer) -> list[str]:
    names = {id(weight): name for name, weight in module.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
