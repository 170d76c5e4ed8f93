"""The optimizer, and the learning rate as a function of how far training is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from compress.core.errors import StageFailed

if TYPE_CHECKING:
    from compress.training.settings import Training

WARM_UP = 0.3
"""Share of the steps in which `onecycle` rises."""
START_DIVISOR = 25
"""The peak over the first learning rate of `onecycle`."""


def build_optimizer(module: torch.nn.Module, training: Training) -> torch.optim.Optimizer:
    """Return the optimizer; biases and norms, which are vectors, are not decayed.

    Raises:
        StageFailed: the module has nothing to train.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise StageFailed("the model has no weights that require gradients: nothing to train")
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": training.decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    rate = training.peak_learning_rate
    if training.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate)
    return torch.optim.SGD(groups, lr=rate, momentum=training.momentum, nesterov=training.nesterov)


def learning_rate(training: Training, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0 over the whole training.

    A function of the step alone, so that resuming needs no scheduler's state. ``onecycle`` follows
    Smith and Topin, "Super-Convergence" (2018), with cosine ramps and a constant momentum.
    """
    done = step / steps
    peak = training.peak_learning_rate
    if training.schedule == "constant":
        return peak
    if training.schedule == "cosine":
        return peak * _falling(done)
    if done < WARM_UP:
        first = peak / START_DIVISOR
        return first + (peak - first) * (1 - _falling(done / WARM_UP))
    return peak * _falling((done - WARM_UP) / (1 - WARM_UP))


def set_learning_rate_(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group, in place."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def _falling(done: float) -> float:
    """Return half a cosine, from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * done))
