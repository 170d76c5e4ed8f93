"""Plans a verified slice of a module, without the stage."""

from collections.abc import Sequence

import torch
from torch import nn

from compress.pruning.allocation.ranking import rank
from compress.pruning.allocation.ratios import Limits
from compress.pruning.channel_settings import Criterion
from compress.pruning.dependency.channel_groups import SlicePlan


def plan_slices(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    ratio: float,
    importance: Criterion = "l2",
    round_to: int = 16,
    exclude: Sequence[str] = (),
    seed: int = 0,
) -> SlicePlan:
    """Plan verified slices that remove a fraction of each group; the module is not changed."""
    ranking = rank(module, inputs, importance, exclude=exclude, seed=seed)
    return ranking.verify(ranking.allocate(ratio, Limits(round_to=round_to)))
