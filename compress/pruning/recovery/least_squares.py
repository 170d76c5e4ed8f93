"""Refitting: layers that read fewer channels answer as nearly as they can as they did before.

Closed-form least squares on activations, without labels and without a training step, as He, Zhang
and Sun reconstruct layers in "Channel Pruning for Accelerating Very Deep Neural Networks" (2017).
Layers are taken in the order in which they run, each with the inputs that the smaller model now
gives it, so that it also makes up for the errors before it.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compress.pruning.importance.layer_calls import Calls, Enough, LayerCall, run_one, watched
from compress.pruning.importance.moments import LARGEST, Moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from compress.data.batch import Batch
    from compress.pruning.dependency.channel_groups import Kept

log = logging.getLogger(__name__)

RIDGE = 1e-4
"""Weight of staying as it is, relative to the mean square of a layer's inputs."""


@dataclass(frozen=True)
class Refitted:
    """How far a layer's answers lie from those before the cut, squared, relative to their size."""

    weight: str
    before: float
    after: float


@dataclass(frozen=True)
class Reader:
    """A layer that reads fewer channels than before, and may be refitted."""

    weight: str
    bias: str | None
    """Its bias, where no other layer has the same."""
    read_axis: int
    groups: int
    calls: int
    """How many times a forward pass calls it."""


@torch.no_grad()
def refit_(
    module: nn.Module,
    reference: nn.Module,
    kept: Kept,
    batches: Sequence[Batch],
    device: str = "cpu",
    ridge: float = RIDGE,
) -> list[Refitted]:
    """Refit, in place, the weights and biases of the layers that read fewer channels.

    Products with a weight and convolutions are refitted where nothing else uses their weight; other
    layers stay as they were cut.

    Args:
        module: the cut module, in eval mode.
        reference: the module as it was before, which is not changed.
        kept: what of the reference's tensors is left.
        batches: samples that both are asked.
        device: where they run.
        ridge: how strongly weights are held where they are; see :data:`RIDGE`.

    Raises:
        StageFailed: the modules do not take the batches.
    """
    refitted = []
    for part in (module, reference):
        part.eval().to(device)
    for reader in readers(module, kept, batches[0], device):
        moments, size = _errors(reader, module, reference, kept, batches, device)
        refitted.append(_solve_(reader, module, moments, size, ridge))
    for part in (module, reference):
        part.cpu()
    return refitted


def readers(module: nn.Module, kept: Kept, batch: Batch, device: str) -> list[Reader]:
    """Return the layers to refit, in the order in which they run."""
    calls: dict[str, list[LayerCall]] = {}

    def watch(call: LayerCall) -> None:
        calls.setdefault(call.weight, []).append(call.without_values())

    otherwise = watched(module, [batch], watch, device)
    owners = Counter(bias for own in calls.values() for bias in {call.bias for call in own})
    found = []
    for weight, own in calls.items():
        last = own[-1]
        cut = last.read_axis in kept.get(weight, {})
        alike = len({(call.read_axis, call.bias) for call in own}) == 1
        if cut and alike and weight not in otherwise and last.columns <= LARGEST:
            bias = last.bias if owners[last.bias] == 1 and last.bias not in otherwise else None
            found.append(Reader(weight, bias, last.read_axis, last.groups, len(own)))
    return found


def _errors(
    reader: Reader,
    module: nn.Module,
    reference: nn.Module,
    kept: Kept,
    batches: Sequence[Batch],
    device: str,
) -> tuple[Moments, float]:
    """Return the moments of a layer's inputs with its errors, and the size of right answers."""
    moments, size = Moments(), 0.0
    rows = kept[reader.weight].get(1 - reader.read_axis)
    for batch in batches:
        right = [call.output for call in _calls_of(reader, reference, batch, device)]
        found = _calls_of(reader, module, batch, device)
        for expected, call in zip(right, found, strict=True):
            if rows is not None:
                index = torch.tensor(rows, device=expected.device)
                expected = expected.index_select(call.channel_axis, index)
            size += float(expected.double().square().sum())
            for columns, errors in call.parts(expected - call.output):
                moments.add_(columns, errors)
    return moments, size


def _calls_of(reader: Reader, module: nn.Module, batch: Batch, device: str) -> list[LayerCall]:
    """Return a layer's calls on one batch; the pass ends with the last of them."""
    found: list[LayerCall] = []

    def watch(call: LayerCall) -> None:
        if call.weight == reader.weight:
            found.append(call)
            if len(found) == reader.calls:
                raise Enough

    run_one(module, batch.to(device), Calls(module, watch))
    return found


def _solve_(
    reader: Reader, module: nn.Module, moments: Moments, size: float, ridge: float
) -> Refitted:
    """Change a layer's weight and bias so that its squared error is least, in place."""
    change_gio, shift_go = least_squares(moments, ridge, intercept=reader.bias is not None)
    weight = module.get_parameter(reader.weight)
    change_OI = change_gio.mT.reshape(-1, change_gio.shape[1])
    change = change_OI.mT if reader.read_axis == 0 else change_OI.reshape(weight.shape)
    weight.add_(change.to(weight))
    if reader.bias is not None:
        bias = module.get_parameter(reader.bias)
        bias.add_(shift_go.flatten().to(bias))
    gained = 2 * (change_gio * moments.cross_gio).sum() + 2 * (shift_go * moments.answers_go).sum()
    moved = (change_gio * (moments.gram_gii @ change_gio)).sum()
    moved += 2 * (shift_go * (moments.columns_gi[:, None] @ change_gio)[:, 0]).sum()
    moved += moments.places * shift_go.square().sum()
    left = max(0.0, moments.energy - float(gained - moved))
    size = max(size, 1e-30)
    return Refitted(reader.weight, moments.energy / size, left / size)


def least_squares(
    moments: Moments, ridge: float, *, intercept: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrices, and shifts, that give the answers from the columns with least error.

    Args:
        moments: what is known of columns and answers.
        ridge: weight of small matrices, relative to the columns' mean square.
        intercept: whether there is a shift; where not it is zero.
    """
    gram_gii, cross_gio = moments.gram_gii, moments.cross_gio
    if intercept:
        mean_gi = moments.columns_gi / moments.places
        gram_gii = gram_gii - mean_gi[:, :, None] * moments.columns_gi[:, None]
        cross_gio = cross_gio - mean_gi[:, :, None] * moments.answers_go[:, None]
    damping = (ridge * moments.gram_gii.diagonal(dim1=1, dim2=2).mean()).clamp_min(1e-30)
    identity = torch.eye(gram_gii.shape[1], dtype=gram_gii.dtype, device=gram_gii.device)
    matrix_gio = torch.linalg.solve(gram_gii + damping * identity, cross_gio)
    if not intercept:
        return matrix_gio, torch.zeros_like(moments.answers_go)
    shift_go = moments.answers_go - (moments.columns_gi[:, None] @ matrix_gio)[:, 0]
    return matrix_gio, shift_go / moments.places
