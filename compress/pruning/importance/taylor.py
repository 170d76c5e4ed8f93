"""Score channels by derivatives of a loss on calibration samples.

With targets it is the task's loss, without targets the change of the outputs. A channel's gate is
where the next layers read it: the derivative with respect to these weights, times the weights, is
the derivative with respect to a factor on the channel itself (Molchanov et al., 2019, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from compress.common.errors import CompressError
from compress.common.forward import copy_module, flatten_outputs
from compress.core.loss import INFERRED_LOSS, refuse_without_curvature
from compress.core.task_targets import has_target
from compress.data.batch import Batch
from compress.data.targets import select
from compress.pruning.importance.layer_calls import samples_refused
from compress.pruning.importance.weight_norms import sums_by_channel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.core.loss import Loss, LossFunction
    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup
    from compress.pruning.dependency.rules.channel_labels import Slot

# At a minimum of the loss, the gradients of many samples together cancel.
SAMPLES_PER_GRADIENT = 16


@dataclass(frozen=True)
class ScoringSamples:
    """The samples on which channels are scored, and how."""

    batches: Sequence[Batch] = ()
    device: str = "cpu"
    """Where samples are run."""
    seed: int = 0
    """Of random scores and probes."""
    loss: Loss = INFERRED_LOSS
    """What derivatives are taken of, where samples have targets."""

    @classmethod
    def from_context(cls, context: Context, signature: Signature, batches: Sequence[Batch]) -> Self:
        """Score on a run's device, by its loss."""
        loss = context.loss.for_model(signature).infer_targets(context.data)
        return cls(batches, context.device, context.seed, loss)


def taylor(
    module: nn.Module,
    groups: Sequence[ChannelGroup],
    graph: AxisGraph,
    samples: ScoringSamples,
) -> list[torch.Tensor]:
    """Score each channel by the first-order change of the loss when it is zeroed.

    Molchanov et al., "Importance Estimation for Neural Network Pruning" (2019), of groups: the root
    mean square over parts of the samples. Without labels, the change is that of the outputs along
    random directions, whose mean square is that of the outputs' change itself.
    """
    twin, weights = _prepared(module, groups, samples.device)
    on_targets = samples.loss.function()
    generator = torch.Generator().manual_seed(samples.seed)
    totals = [torch.zeros(len(group.channels), dtype=torch.float64) for group in groups]
    count = 0
    for part in parts(labelled_or_all(samples.batches)):
        value = _loss(twin, part.to(samples.device), on_targets, generator)
        # materialize_grads: gates on which the loss does not depend get zeros.
        gradients = torch.autograd.grad(value, list(weights.values()), materialize_grads=True)
        products = {n: g * w for (n, w), g in zip(weights.items(), gradients, strict=True)}
        for group, total in zip(groups, totals, strict=True):
            changes = sums_by_channel(group, graph, gates(group), products)
            total += len(part) * changes.square()
        count += len(part)
    return [(total / count).sqrt() for total in totals]


def hessian(
    module: nn.Module,
    groups: Sequence[ChannelGroup],
    graph: AxisGraph,
    samples: ScoringSamples,
) -> list[torch.Tensor]:
    """Score each channel by the second-order change of the loss when it is zeroed at a minimum.

    LeCun, Denker and Solla, "Optimal Brain Damage" (1990), with a channel's whole block of the
    Hessian instead of the diagonal: half of w'Hw, estimated for all channels at once by random
    signs (Hutchinson, 1989). Without labels, the loss is half the squared change of the outputs.

    Raises:
        StageFailed: the loss has no second derivative.
    """
    refuse_without_curvature(samples.loss)
    twin, weights = _prepared(module, groups, samples.device)
    on_targets = samples.loss.function()
    generator = torch.Generator().manual_seed(samples.seed)
    totals = [torch.zeros(len(group.channels), dtype=torch.float64) for group in groups]
    count = 0
    for part in parts(labelled_or_all(samples.batches)):
        signs = torch.randint(0, 2, (graph.class_count,), generator=generator) * 2.0 - 1
        # Each entry times its channel's sign: one product with the Hessian probes all channels.
        probe = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for group in groups:
            members = torch.isin(torch.arange(len(signs)), torch.tensor(group.channels))
            for name, axis in gates(group):
                if name in weights:
                    weight = weights[name].detach()
                    own = (signs * members)[graph.classes[name, axis]].to(weight)
                    shape = [-1 if i == axis else 1 for i in range(weight.dim())]
                    probe[name] += weight * own.view(shape)
        # Fused attention has no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            value = _loss(twin, part.to(samples.device), on_targets, None)
            slopes = torch.autograd.grad(
                value, list(weights.values()), create_graph=True, materialize_grads=True
            )
        curved = torch.autograd.grad(
            slopes, list(weights.values()), list(probe.values()), materialize_grads=True
        )
        products = {n: c * w for (n, w), c in zip(weights.items(), curved, strict=True)}
        for group, total in zip(groups, totals, strict=True):
            forms = sums_by_channel(group, graph, gates(group), products)
            total += len(part) * forms * signs[list(group.channels)]
        count += len(part)
    return [(total / count).abs() / 2 for total in totals]


def gates(group: ChannelGroup) -> tuple[Slot, ...]:
    """Return the slots at which a group's channels are gated: where they are read, or all slots."""
    return group.consumed_slots or group.slots


def labelled_or_all(batches: Sequence[Batch]) -> list[Batch]:
    """Return the samples that have a target, or all of them without targets if none has."""
    labelled = []
    for batch in batches:
        if batch.target is not None:
            known = has_target(batch.target)
            if known.any():
                inputs = tuple(x[known] for x in batch.inputs)
                labelled.append(Batch(inputs, select(batch.target, known)))
    return labelled or [Batch(batch.inputs, None) for batch in batches]


def parts(batches: Sequence[Batch], size: int = SAMPLES_PER_GRADIENT) -> Iterator[Batch]:
    """Yield batches of at most a number of samples."""
    for batch in batches:
        for i in range(0, len(batch), size):
            part = slice(i, i + size)
            target = None if batch.target is None else select(batch.target, part)
            yield Batch(tuple(x[part] for x in batch.inputs), target)


def _prepared(
    module: nn.Module, groups: Sequence[ChannelGroup], device: str
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Copy the module for differentiation, and return the weights that are gates."""
    twin = copy_module(module).eval().requires_grad_(False).to(device)
    named = dict(twin.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(tensor for group in groups for tensor, _ in gates(group))
    weights = {name: named[name].requires_grad_() for name in names if name in named}
    return twin, weights


def _loss(
    module: nn.Module, batch: Batch, on_targets: LossFunction, generator: torch.Generator | None
) -> torch.Tensor:
    """Return the value to differentiate: the task's loss, or a function of the outputs' change."""
    try:
        # cuDNN differentiates recurrent layers in training mode only.
        with torch.backends.cudnn.flags(enabled=False):
            outputs = flatten_outputs(module(*batch.inputs))
        if batch.target is not None:
            return on_targets(outputs, batch.target, label_smoothing=0.0)
    except CompressError:
        raise
    except Exception as error:
        raise samples_refused(batch, error) from error
    floating = [x for x in outputs if x.is_floating_point()]
    if generator is None:
        return sum((x - x.detach()).square().sum() for x in floating) / (2 * len(batch))  # type: ignore[return-value]
    along = [torch.randn(x.shape, generator=generator).to(x) for x in floating]
    return sum((x * d).sum() for x, d in zip(floating, along, strict=True)) / len(batch)  # type: ignore[return-value]
