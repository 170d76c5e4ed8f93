"""How far a training is, on disk after every epoch, so that an interruption costs one epoch."""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from compress.core.errors import first_line
from compress.core.files import sync
from compress.core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

log = logging.getLogger(__name__)

CHECKPOINT = "checkpoint.pt"

Tensors = dict[str, torch.Tensor]


class Epoch(Settings):
    """What one epoch came to."""

    epoch: int
    """Counted from 1; 0 is the model as it came in."""
    loss: float | None
    """Mean of the objective over the epoch's steps; None for epoch 0."""
    metric: float | None
    """The metric on `val` after the epoch; None without a `val` split."""
    learning_rate: float | None
    """Learning rate of the epoch's last step; None for epoch 0."""


@dataclass
class State:
    """A training between two epochs."""

    history: list[Epoch] = field(default_factory=list)
    kept: Epoch | None = None
    """The epoch whose weights are kept so far."""
    kept_weights: Tensors = field(default_factory=dict)
    weights: Tensors = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)

    @property
    def trained_epochs(self) -> int:
        """Number of epochs trained."""
        return sum(1 for epoch in self.history if epoch.epoch > 0)


def copy_of(weights: Mapping[str, torch.Tensor]) -> Tensors:
    """Return the tensors' values on the CPU, in memory of their own."""
    return {name: value.detach().cpu().clone() for name, value in weights.items()}


def write_state(folder: Path, state: State) -> None:
    """Write the state so that the file is either the old one or the whole new one."""
    partial = folder / f"{CHECKPOINT}.partial"
    content = {
        "history": [epoch.model_dump() for epoch in state.history],
        "kept": state.kept.model_dump() if state.kept else None,
        "kept_weights": state.kept_weights,
        "weights": state.weights,
        "optimizer": state.optimizer,
    }
    with partial.open("wb") as stream:
        torch.save(content, stream)
    sync(partial)
    partial.replace(folder / CHECKPOINT)
    sync(folder)


def read_state(folder: Path) -> State | None:
    """Return the state that was written last, or None where there is none that can be read."""
    file = folder / CHECKPOINT
    if not file.is_file():
        return None
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        log.warning("%s cannot be read (%s); training starts anew", file, first_line(error))
        return None
    return State(
        history=[Epoch(**epoch) for epoch in content["history"]],
        kept=Epoch(**content["kept"]) if content["kept"] else None,
        kept_weights=content["kept_weights"],
        weights=content["weights"],
        optimizer=content["optimizer"],
    )
