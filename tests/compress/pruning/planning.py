"""Plans a verified slice of a module, without the stage."""

from collections.abc import Sequence

import torch
from torch import nn

from compress.pruning.allocation.ranking import rank
from compress.pruning.channel_settings import ChannelSelection, Criterion
from compress.pruning.dependency.channel_groups import SlicePlan
from compress.pruning.importance.scores import ScoringSamples
from compress.pruning.verification.masked_equivalence import VerificationInputs


def plan_slices(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    ratio: float,
    importance: Criterion = "l2",
    round_to: int = 16,
    exclude: Sequence[str] = (),
    seed: int = 0,
    real: Sequence[torch.Tensor] | None = None,
) -> SlicePlan:
    """Plan verified slices that remove a fraction of each group; the module is not changed."""
    ranking = rank(
        module,
        VerificationInputs(inputs, real=real),
        ChannelSelection(importance=importance, exclude=exclude),
        ScoringSamples(seed=seed),
    )
    return ranking.verify(ranking.allocate(ratio, ChannelSelection(round_to=round_to)))
