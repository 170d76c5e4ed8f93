"""Score the channels of a group by their weights alone.

Every score covers a channel's entries in all tensors of its group, not only one filter (Fang et
al., "DepGraph", 2023). Buffers do not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup
    from compress.pruning.dependency.rules.channel_labels import Slot


def sums_by_channel(
    group: ChannelGroup,
    graph: AxisGraph,
    slots: Iterable[Slot],
    values: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Sum the values of each channel's entries along some slots, given a value for each entry.

    Tensors without values add nothing.
    """
    totals = torch.zeros(graph.class_count, dtype=torch.float64)
    for tensor, axis in slots:
        if tensor in values:
            value = values[tensor].detach().double().cpu().movedim(axis, 0)
            totals.scatter_add_(
                0,
                graph.classes[tensor, axis],
                value.flatten(1).sum(1) if value.dim() > 1 else value,
            )
    return totals[list(group.channels)]


def norm(
    group: ChannelGroup, graph: AxisGraph, parameters: Mapping[str, torch.Tensor], power: int
) -> torch.Tensor:
    """Compute the L1 or L2 norm of each channel's weights.

    Li et al., "Pruning Filters for Efficient ConvNets" (2017).
    """
    slots = [slot for slot in group.slots if slot[0] in parameters]
    powers = {name: parameters[name].detach().double().abs().pow(power) for name, _ in slots}
    return sums_by_channel(group, graph, slots, powers).pow(1 / power)


def lamp(
    group: ChannelGroup, graph: AxisGraph, parameters: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Divide each channel's squared norm by the sum of all that are not smaller, including itself.

    Lee et al., "Layer-adaptive Sparsity for the Magnitude-based Pruning" (2021), of groups: the
    order within a group is that of ``l2``; scores of different groups are comparable.
    """
    squares = norm(group, graph, parameters, 2).square()
    order = squares.argsort(stable=True)
    not_smaller = squares[order].flip(0).cumsum(0).flip(0)
    scores = torch.empty_like(squares)
    # `tiny`: all weights of a group may be zero.
    scores[order] = squares[order] / not_smaller.clamp_min(torch.finfo(squares.dtype).tiny)
    return scores


def geometric_median_distance(
    group: ChannelGroup, graph: AxisGraph, parameters: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Sum each channel's distances to all others of its group.

    He et al., "Filter Pruning via Geometric Median" (2019): a channel near the geometric median is
    redundant, as the others can represent it.
    """
    # Each channel's weights in a row; shorter rows are padded with zeros.
    columns = []
    for tensor, axis in group.slots:
        if tensor in parameters:
            rows = parameters[tensor].detach().double().cpu().movedim(axis, 0)
            rows = rows.reshape(len(rows), -1)
            classes = graph.classes[tensor, axis]
            own = [rows[classes == channel].flatten() for channel in group.channels]
            columns.append(nn.utils.rnn.pad_sequence(own, batch_first=True))
    vectors = torch.cat(columns, 1)
    # Distances by a matrix product lose digits where channels are nearly equal.
    return torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").sum(1)


def batch_norm_scale(
    group: ChannelGroup, graph: AxisGraph, module: nn.Module
) -> torch.Tensor | None:
    """Sum the absolute BatchNorm scales of each channel, or return None if there are none.

    Liu et al., "Learning Efficient Convolutional Networks through Network Slimming" (2017).
    """
    scales = {
        f"{name}.weight": layer.weight.detach().abs()
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.weight is not None
    }
    slots = [slot for slot in group.slots if slot[0] in scales]
    return sums_by_channel(group, graph, slots, scales) if slots else None
