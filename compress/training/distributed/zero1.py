"""ZeRO stage 1: DDP with the optimizer state sharded over the ranks."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from compress.checkpoint.distributed_checkpoint import read_distributed
from compress.training.checkpoint.state_dict import STATE
from compress.training.distributed.ddp import DDPStrategy
from compress.training.optim.optimizer import (
    explain_rejected_arguments,
    optimizer_arguments,
    optimizer_class,
    parameter_groups,
)

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from compress.training.checkpoint.metadata import Tensors
    from compress.training.config.training import Training


class Zero1Strategy(DDPStrategy):
    """Every rank has the whole model, and the optimizer state of some of its weights.

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2019), section 5.1.
    """

    def optimizer(self, module: nn.Module, training: Training) -> torch.optim.Optimizer:
        """Build an optimizer that steps its share of the weights and broadcasts them."""
        groups = parameter_groups(module, training)
        self.weight_bytes: int = sum(p.nbytes for group in groups for p in group["params"])
        with explain_rejected_arguments(training):
            return ZeroRedundancyOptimizer(
                groups, optimizer_class=optimizer_class(training), **optimizer_arguments(training)
            )

    def sent_bytes(self, steps: int) -> int | None:
        """Return the bytes of gradients, and of the weights that each process broadcasts."""
        # Each process sends the weights it has stepped; their mean, as shares differ by a weight.
        return (super().sent_bytes(steps) or 0) + self.weight_bytes * (self.ranks - 1) // self.ranks

    def optimizer_tensors(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
        """Gather the state on rank 0, in the format of all strategies."""
        # torch.distributed.checkpoint refuses ZeroRedundancyOptimizer's own state.
        sharded = cast("ZeroRedundancyOptimizer", optimizer)
        sharded.consolidate_state_dict(to=0)
        if not self.is_main:
            return {}
        names = _names(module, optimizer)
        return {
            f"{STATE}{names[index]}.{what}": value
            for index, state in sharded.state_dict()["state"].items()
            for what, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def load_optimizer_(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path
    ) -> None:
        """Read the whole state; ``load_state_dict`` keeps this process's share of it."""
        saved = read_distributed(checkpoint).get("optimizer", {})
        indices = {name: index for index, name in enumerate(_names(module, optimizer))}
        weights = dict(module.named_parameters())
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, stored in saved.items():
            weight, _, what = name.removeprefix(STATE).rpartition(".")
            value = stored.read()
            # In the weight's memory format: fused optimizers pair elements by their places.
            if value.shape == weights[weight].shape:
                layout = torch.empty_like(weights[weight], dtype=value.dtype, device=value.device)
                value = layout.copy_(value)
            state.setdefault(indices[weight], {})[what] = value
        # As in a state dict, where groups have numbers in the place of weights.
        numbers = count()
        groups = [
            {**group, "params": [next(numbers) for _ in group["params"]]}
            for group in optimizer.param_groups
        ]
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the weights' names in the optimizer's order."""
    names = {id(weight): name for name, weight in module.named_parameters()}
    return [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
