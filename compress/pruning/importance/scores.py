"""Scores of all channels of a module, by any criterion."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.core.loss import INFERRED_LOSS
from compress.pruning.importance import activation_saliency, taylor, weight_norms
from compress.pruning.importance.criteria import FROM_DATA, OF_GRADIENTS, Criterion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from compress.core.loss import Loss
    from compress.data.batch import Batch
    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup

Scores = list[torch.Tensor | str]
"""For each family a score for each channel, in their order, or why there is none."""


def score_families(
    module: nn.Module,
    families: Sequence[ChannelGroup],
    graph: AxisGraph,
    criterion: Criterion,
    *,
    batches: Sequence[Batch] = (),
    device: str = "cpu",
    seed: int = 0,
    loss: Loss = INFERRED_LOSS,
) -> Scores:
    """Return how much each channel matters, or why a criterion cannot tell; nothing is changed.

    Args:
        module: a module in eval mode.
        families: the families to score.
        graph: the module's axis graph.
        criterion: how channels are ranked.
        batches: calibration samples, for the criteria that need them.
        device: where samples are run.
        seed: of what is drawn at random.
        loss: whose derivatives `taylor` and `hessian` take, where samples have targets.

    Raises:
        ValueError: the criterion needs samples and there are none.
        StageFailed: the module does not take the samples.
    """
    if criterion in FROM_DATA and not batches:
        raise ValueError(f"importance {criterion!r} needs calibration samples")
    if criterion in OF_GRADIENTS:
        judge = taylor.taylor if criterion == "taylor" else taylor.hessian
        return list(judge(module, families, graph, batches, device, seed, loss))
    if criterion in ("wanda", "obs"):
        return _by_readers(module, families, graph, criterion, batches, device)
    generator = torch.Generator().manual_seed(seed)
    return [_by_weights(module, family, graph, criterion, generator) for family in families]


def _by_readers(
    module: nn.Module,
    families: Sequence[ChannelGroup],
    graph: AxisGraph,
    criterion: Criterion,
    batches: Sequence[Batch],
    device: str,
) -> Scores:
    judge = (
        activation_saliency.wanda
        if criterion == "wanda"
        else activation_saliency.optimal_brain_surgeon
    )
    missing = f"no product or convolution reads its channels, so {criterion} cannot rank them"
    found = activation_saliency.readings_of(module, families, graph, batches, device)
    return [judge(readings) if readings else missing for readings in found]


def _by_weights(
    module: nn.Module,
    family: ChannelGroup,
    graph: AxisGraph,
    criterion: Criterion,
    generator: torch.Generator,
) -> torch.Tensor | str:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if criterion == "random":
        return torch.rand(len(family.channels), generator=generator, dtype=torch.float64)
    if criterion == "bn_scale":
        scales = weight_norms.batch_norm_scale(family, graph, module)
        return (
            "no BatchNorm scales its channels, so bn_scale cannot rank them"
            if (scales is None)
            else scales
        )
    if criterion == "fpgm":
        return weight_norms.geometric_median_distance(family, graph, parameters)
    if criterion == "lamp":
        return weight_norms.lamp(family, graph, parameters)
    return weight_norms.norm(family, graph, parameters, 1 if criterion == "l1" else 2)
