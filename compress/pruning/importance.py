"""How much a channel matters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compress.pruning.families import AxisGraph, Family

Criterion: TypeAlias = Literal["l1", "l2", "random"]


def channel_importance(
    family: Family,
    graph: AxisGraph,
    parameters: Mapping[str, torch.Tensor],
    criterion: Criterion,
    generator: torch.Generator,
) -> torch.Tensor:
    """Return a score for each of a family's channels, in their order.

    ``l1`` and ``l2`` are norms over all of a channel's weights, in every tensor of the family: a
    group's norm rather than a filter's (Fang et al., "DepGraph", 2023).

    Args:
        family: the channels.
        graph: says which entries belong to each.
        parameters: the module's parameters by name; buffers do not count.
        criterion: `l1`, `l2` or `random`.
        generator: for `random`.
    """
    if criterion == "random":
        return torch.rand(len(family.channels), generator=generator)
    power = 1 if criterion == "l1" else 2
    scores = torch.zeros(graph.class_count, dtype=torch.float64)
    for tensor, axis in family.slots:
        if tensor in parameters:
            weight = parameters[tensor].detach().double().abs().pow(power)
            sums = weight.movedim(axis, 0).reshape(weight.shape[axis], -1).sum(1)
            scores.scatter_add_(0, graph.classes[tensor, axis], sums)
    return scores[list(family.channels)].pow(1 / power)
