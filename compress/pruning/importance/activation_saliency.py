"""How much each channel matters to the layers that read it, by what they read on samples."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from compress.pruning.importance.layer_calls import LayerCall, watched
from compress.pruning.importance.moments import LARGEST, Moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from compress.data.batch import Batch
    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup

RIDGE = 1e-4
"""What is added to second moments, relative to their mean, so that they can be inverted."""
ROUNDS = 128
"""Rounds in which a family is emptied; of wider ones several channels leave in each."""


@dataclass(frozen=True)
class Reading:
    """A layer that reads a family's channels, as matrices."""

    weight_gio: torch.Tensor
    gram_gii: torch.Tensor
    """Second moments of what it reads."""
    entries_ce: torch.Tensor
    """Columns of each channel."""


def wanda(readings: Sequence[Reading]) -> torch.Tensor:
    """Return the norm of what each channel adds to its readers' outputs, were it uncorrelated.

    Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (2023): weight
    magnitude times activation norm, here of all weights that read a channel.
    """
    total = torch.zeros(len(readings[0].entries_ce), dtype=torch.float64)
    for reading in readings:
        activation_gi = reading.gram_gii.diagonal(dim1=1, dim2=2)
        contribution_gi = reading.weight_gio.square().sum(2) * activation_gi
        total += contribution_gi.sum(0)[reading.entries_ce].sum(1)
    return total.sqrt()


def optimal_brain_surgeon(readings: Sequence[Reading]) -> torch.Tensor:
    """Return the rise of the readers' squared error when each channel leaves and the others adapt.

    Hassibi and Stork's "Optimal Brain Surgeon" (1993) of whole structures, as in Kurtic, Frantar
    and Alistarh, "ZipLM" (2023): channels leave one after the other, the cheapest first, and the
    weights that stay make up for each. The rise is relative to the size of each reader's output.
    """
    states = [_State.of(reading) for reading in readings]
    alive = torch.arange(len(readings[0].entries_ce))
    scores = torch.zeros(len(alive), dtype=torch.float64)
    per_round = -(-len(alive) // ROUNDS)
    floor = 0.0
    while len(alive):
        rises = torch.stack([state.rises(alive) for state in states]).sum(0)
        order = rises.argsort(stable=True)[:per_round]
        leaving = alive[order]
        scores[leaving] = rises[order].clamp_min(floor)
        floor = float(scores[leaving].max())
        alive = alive[~torch.isin(alive, leaving)]
        for state in states:
            state.remove_(leaving)
    return scores


@dataclass
class _State:
    """A reader while channels leave: what its weights would now be."""

    weight_gio: torch.Tensor
    inverse_gii: torch.Tensor
    entries_ce: torch.Tensor
    size: float

    @classmethod
    def of(cls, reading: Reading) -> _State:
        gram_gii, weight_gio = reading.gram_gii, reading.weight_gio
        damping = RIDGE * gram_gii.diagonal(dim1=1, dim2=2).mean().clamp_min(1e-30)
        identity = torch.eye(gram_gii.shape[1], dtype=gram_gii.dtype)
        inverse_gii = torch.linalg.inv(gram_gii + damping * identity)
        size = float((weight_gio * (gram_gii @ weight_gio)).sum())
        return cls(weight_gio, inverse_gii, reading.entries_ce, max(size, 1e-30))

    def rises(self, channels: torch.Tensor) -> torch.Tensor:
        """Return the relative rise of the squared error when each channel leaves alone."""
        rows_ce = self.entries_ce[channels]
        block_gcee = self.inverse_gii[:, rows_ce[:, :, None], rows_ce[:, None, :]]
        weight_gceo = self.weight_gio[:, rows_ce]
        rise_gc = (weight_gceo * torch.linalg.solve(block_gcee, weight_gceo)).sum((2, 3))
        rises: torch.Tensor = rise_gc.sum(0) / self.size
        return rises

    def remove_(self, channels: torch.Tensor) -> None:
        """Let channels leave and the other weights make up for them, in place."""
        rows_e = self.entries_ce[channels].flatten()
        block_gee = self.inverse_gii[:, rows_e[:, None], rows_e]
        across_gei = self.inverse_gii[:, rows_e]
        solved_gei = torch.linalg.solve(block_gee, across_gei)
        stays = torch.ones(across_gei.shape[2], dtype=torch.bool)
        stays[rows_e] = False
        solved_gei, across_gei = solved_gei[:, :, stays], across_gei[:, :, stays]
        leaving_geo = self.weight_gio[:, rows_e]
        self.weight_gio = self.weight_gio[:, stays] - solved_gei.mT @ leaving_geo
        self.inverse_gii = self.inverse_gii[:, stays][:, :, stays] - across_gei.mT @ solved_gei
        self.entries_ce = (stays.cumsum(0) - 1)[self.entries_ce]


def readings_of(
    module: nn.Module,
    families: Sequence[ChannelGroup],
    graph: AxisGraph,
    batches: Sequence[Batch],
    device: str = "cpu",
) -> list[list[Reading]]:
    """Return, for each family, the layers that read its channels by products or convolutions."""
    slots = {slot for family in families for slot in family.read_by}
    calls: dict[str, LayerCall] = {}
    moments: dict[str, Moments] = {}

    def watch(call: LayerCall) -> None:
        if (call.weight, call.read_axis) in slots and call.columns <= LARGEST:
            calls[call.weight] = call.without_values()
            own = moments.setdefault(call.weight, Moments())
            for columns, _ in call.parts():
                own.add_(columns)

    module.to(device)
    watched(module, batches, watch, device)
    module.cpu()
    weights = dict(module.named_parameters())
    return [
        [
            _reading(family, graph, weights[name], calls[name], moments[name])
            for name, axis in family.read_by
            if name in calls and calls[name].read_axis == axis
        ]
        for family in families
    ]


def _reading(
    family: ChannelGroup, graph: AxisGraph, weight: torch.Tensor, call: LayerCall, moments: Moments
) -> Reading:
    weight = weight.detach().double().cpu()
    if call.read_axis == 0:
        weight_gio = weight[None]
    else:
        weight_gio = weight.reshape(call.groups, -1, call.columns).mT
    classes = graph.classes[call.weight, call.read_axis]
    # A channel of a convolution's input takes as many columns as its window has places.
    classes = classes.repeat_interleave(prod(call.kernel))
    own = [(classes == channel).nonzero().flatten() for channel in family.channels]
    return Reading(weight_gio, moments.gram_gii.cpu(), torch.stack(own))
