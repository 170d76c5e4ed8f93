"""ZeRO stage 1: DDP whose optimizer state is spread over the ranks."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from compress.checkpoint.distributed_checkpoint import read_distributed
from compress.training.checkpoint.state_dict import STATE
from compress.training.distributed.ddp import DDPStrategy
from compress.training.optim.optimizer import (
    optimizer_arguments,
    optimizer_class,
    parameter_groups,
    refusing_wrong_arguments,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from compress.training.checkpoint.metadata import Tensors
    from compress.training.config.training import Training


class Zero1Strategy(DDPStrategy):
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

    def optimizer_tensors(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
        """Gather the whole state on the leading process: torch's checkpoints refuse its parts."""
        spread = cast("ZeroRedundancyOptimizer", optimizer)
        spread.consolidate_state_dict(to=0)
        if not self.is_main:
            return {}
        names = _names(module, optimizer)
        return {
            f"{STATE}{names[index]}.{what}": value
            for index, state in spread.state_dict()["state"].items()
            for what, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def load_optimizer_(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path
    ) -> None:
        """Read the whole state and keep this process's part, in place."""
        held = read_distributed(checkpoint).get("optimizer", {})
        indices = {name: index for index, name in enumerate(_names(module, optimizer))}
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, stored in held.items():
            weight, _, what = name.removeprefix(STATE).rpartition(".")
            state.setdefault(indices[weight], {})[what] = stored.read()
        optimizer.load_state_dict({"state": state, "param_groups": _groups(optimizer)})


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the weights' names in the optimizer's order."""
    names = {id(weight): name for name, weight in module.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the optimizer's groups as its state dict has them, with numbers for the weights."""
    numbers = count()
    return [
        {**group, "params": [next(numbers) for _ in group["params"]]}
        for group in optimizer.param_groups
    ]
