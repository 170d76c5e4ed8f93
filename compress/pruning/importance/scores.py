"""Score the channels of groups by any criterion."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from compress.pruning.channel_settings import FROM_DATA, OF_GRADIENTS, Criterion
from compress.pruning.importance import activation_saliency, taylor, weight_norms
from compress.pruning.importance.taylor import ScoringSamples

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup

Scores = list[torch.Tensor | str]
"""For each group the score of each channel, `(channels,)`, or why there is none."""


def score_groups(
    module: nn.Module,
    groups: Sequence[ChannelGroup],
    graph: AxisGraph,
    criterion: Criterion,
    samples: ScoringSamples | None = None,
) -> Scores:
    """Score the importance of each channel, or say why a criterion cannot; nothing is changed.

    Args:
        module: a module in eval mode.
        groups: the groups to score.
        graph: the module's axis graph.
        criterion: how channels are scored.
        samples: for the criteria that need them, and the seed of random scores.

    Raises:
        ValueError: the criterion needs samples and there are none.
        StageFailed: the module does not take the samples.
    """
    samples = samples or ScoringSamples()
    if criterion in FROM_DATA and not samples.batches:
        raise ValueError(f"importance {criterion!r} needs calibration samples")
    if criterion in OF_GRADIENTS:
        by_gradients = taylor.taylor if criterion == "taylor" else taylor.hessian
        return list(by_gradients(module, groups, graph, samples))
    if criterion in ("wanda", "obs"):
        by_consumers = (
            activation_saliency.wanda
            if criterion == "wanda"
            else activation_saliency.optimal_brain_surgeon
        )
        reason = f"no product or convolution reads its channels, so {criterion} cannot rank them"
        consumers_of = activation_saliency.consumers(
            module, groups, graph, samples.batches, samples.device
        )
        return [by_consumers(own) if own else reason for own in consumers_of]
    if criterion == "random":
        generator = torch.Generator().manual_seed(samples.seed)
        counts = [len(group.channels) for group in groups]
        return [torch.rand(n, generator=generator, dtype=torch.float64) for n in counts]
    if criterion == "bn_scale":
        reason = "no BatchNorm scales its channels, so bn_scale cannot rank them"
        scales = (weight_norms.batch_norm_scale(group, graph, module) for group in groups)
        return [reason if own is None else own for own in scales]
    by_weights: dict[str, Callable[..., torch.Tensor]] = {
        "l1": partial(weight_norms.norm, power=1),
        "l2": partial(weight_norms.norm, power=2),
        "lamp": weight_norms.lamp,
        "fpgm": weight_norms.geometric_median_distance,
    }
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return [by_weights[criterion](group, graph, parameters) for group in groups]
