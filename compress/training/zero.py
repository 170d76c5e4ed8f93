"""ZeRO stage 1: DDP whose optimizer state is spread over the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch.distributed.optim import ZeroRedundancyOptimizer

from compress.training.optimizer import (
    optimizer_arguments,
    optimizer_class,
    parameter_groups,
    refusing_wrong_arguments,
)
from compress.training.parallel import DataParallel

if TYPE_CHECKING:
    import torch
    from torch import nn

    from compress.training.settings import Training


class ZeroOne(DataParallel):
    """Every rank holds the whole model, and its part of the optimizer's state.

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2019), section 5.1.
    """

    def optimizer(self, module: nn.Module, training: Training) -> torch.optim.Optimizer:
        """Return the optimizer, which steps its own weights and sends them to the others."""
        groups = parameter_groups(module, training)
        with refusing_wrong_arguments(training):
            return ZeroRedundancyOptimizer(
                groups,
                optimizer_class=optimizer_class(training),
                **optimizer_arguments(training),
            )

    def optimizer_state(
        self, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Gather the whole state on rank 0."""
        spread = cast("ZeroRedundancyOptimizer", optimizer)
        spread.consolidate_state_dict(to=0)
        return spread.state_dict() if self.rank == 0 else {}
