"""Settings of `prune_channels` as plain data, for the algorithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compress.pruning.allocation.ranking import OnUnverified
    from compress.pruning.allocation.ratios import Limits
    from compress.pruning.allocation.targets import Target
    from compress.pruning.finetune import Finetune
    from compress.pruning.importance.criteria import Criterion


@dataclass(frozen=True)
class ChannelPruningConfig:
    """What `prune_channels` does; see the fields of the stage."""

    title: str
    """Name of the stage, for messages and progress."""
    ratio: float | None
    target: Target | None
    widths: Mapping[str, int] | None
    importance: Criterion
    limits: Limits
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    across_norms: bool
    on_unverified: OnUnverified
    iterations: int
    refit: bool
    calibration_samples: int | None
    needs_samples: bool
    """Whether missing calibration samples are an error."""
    uses_loss: bool
    finetune: Finetune | None
