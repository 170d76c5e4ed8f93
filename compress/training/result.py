"""Fit: what a training came to, read from its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.checkpoint.loading import read_state_dict
from compress.checkpoint.safetensors_io import read_safetensors
from compress.checkpoint.state_dict import load_state_
from compress.common.errors import StageFailed
from compress.training.checkpoint.metadata import (
    FOLDER,
    Epoch,
    Progress,
    need_whole,
    newest,
    read_progress,
)
from compress.training.loop.early_stopping import is_over
from compress.training.objectives.objective import BESIDE

if TYPE_CHECKING:
    from pydantic import JsonValue
    from torch import nn

    from compress.artifacts.eager_model import EagerModel
    from compress.checkpoint.state_dict import Weights
    from compress.training.loop.trainer import Job


@dataclass(frozen=True)
class Fit:
    """What a training came to."""

    start: EagerModel
    """The model as it came in."""
    weights: Weights
    """The kept weights and buffers, still on disk."""
    history: tuple[Epoch, ...]
    kept: Epoch
    """The epoch whose weights were kept; 0 is the model as it came in."""
    layouts: tuple[str, ...]
    """How the training was spread over processes, and how differently after interruptions."""

    @property
    def module(self) -> nn.Module:
        """The kept weights in a fresh module, in eval mode, on the CPU."""
        module = self.start.load()
        load_state_(module, self.weights, "the training")
        return module

    def facts(self) -> dict[str, JsonValue]:
        """Return what an artifact says of its training; the same for equal trainings."""
        facts: dict[str, JsonValue] = {
            "history": [epoch.model_dump() for epoch in self.history],
            "kept_epoch": self.kept.epoch,
        }
        warnings: list[JsonValue] = [self.warning] if self.warning else []
        return (
            facts
            | ({"resumed_across": list(self.layouts)} if len(self.layouts) > 1 else {})
            | ({"warnings": warnings} if warnings else {})
        )

    @property
    def warning(self) -> str:
        """What is wrong with a loss that did not vary; empty where it did."""
        found = [epoch for epoch in self.history if epoch.constant_loss]
        if not found:
            return ""
        numbers, value = ", ".join(str(epoch.epoch) for epoch in found), abs(found[0].loss or 0.0)
        return (
            f"the training loss was {value:g} in every step of epoch {numbers}: "
            "it does not depend on the model's outputs, so that nothing was learnt; see whether "
            "`loss`, targets and outputs fit"
        )


def outcome(start: EagerModel, job: Job) -> Fit:
    """Return what the training's last checkpoint says, with the weights of the kept one.

    Raises:
        StageFailed: there is none, or it is damaged.
    """
    last = newest(job.folder)
    progress = read_progress(last) if last else Progress()
    if progress.kept is None or not is_over(job.training, progress.history, job.metric):
        raise StageFailed(
            f"{job.folder} does not hold the end of the training; run again, and it goes on"
        )
    weights: Weights = read_safetensors(start.payload_path)
    if progress.kept_in:
        kept = job.folder / FOLDER / progress.kept_in
        need_whole(kept)
        trained = read_state_dict(kept)
        weights = {name: w for name, w in trained.items() if not name.startswith(BESIDE)}
    return Fit(start, weights, progress.history, progress.kept, progress.layouts)
