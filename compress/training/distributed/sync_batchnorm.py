"""Synchronized BatchNorm: statistics over a step's samples of all processes, as of one process."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from compress.common.errors import StageFailed

RUNNING_MEAN = "running_mean"
"""Last part of the name of a buffer that BatchNorm keeps."""


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
