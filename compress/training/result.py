"""`Fit`: the result of a training, read from its last checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from compress.checkpoint.loading import read_state_dict
from compress.checkpoint.safetensors_io import read_safetensors
from compress.checkpoint.state_dict import StoredTensor, load_state_
from compress.common.errors import StageFailed
from compress.training.checkpoint.metadata import (
    FOLDER,
    Epoch,
    TrainProgress,
    newest_intact,
    read_progress,
    require_intact,
)
from compress.training.loop.evaluation import is_finished
from compress.training.objectives.objective import AUXILIARY_PREFIX

if TYPE_CHECKING:
    from pydantic import JsonValue
    from torch import nn

    from compress.artifacts.eager_model import EagerModel
    from compress.checkpoint.state_dict import Weights
    from compress.training.loop.job import Job


@dataclass(frozen=True)
class Fit:
    """Result of a training."""

    start: EagerModel
    """The input model."""
    weights: Weights
    """The best, or last, weights and buffers; read from disk when they are used."""
    history: tuple[Epoch, ...]
    kept: Epoch
    """The epoch of these weights; 0 is the input model."""
    layouts: tuple[str, ...]
    """Layout of the processes, and each other one after a resumption."""

    @property
    def module(self) -> nn.Module:
        """A new module with these weights, in eval mode, on the CPU."""
        module = self.start.load()
        load_state_(module, self.weights, "the training")
        return module

    def facts(self) -> dict[str, JsonValue]:
        """Return what the manifest records of the training; equal trainings give equal facts."""
        facts: dict[str, JsonValue] = {
            "history": [epoch.model_dump() for epoch in self.history],
            "kept_epoch": self.kept.epoch,
        }
        if len(self.layouts) > 1:
            facts["resumed_across"] = list(self.layouts)
        if self.warning:
            facts["warnings"] = [self.warning]
        return facts

    @property
    def warning(self) -> str:
        """Warning about epochs in which the loss never varied; empty if there are none."""
        constant = [epoch for epoch in self.history if epoch.constant_loss]
        if not constant:
            return ""
        numbers = ", ".join(str(epoch.epoch) for epoch in constant)
        value = abs(constant[0].loss or 0.0)
        return (
            f"the training loss was {value:g} in every step of epoch {numbers}: "
            "it does not depend on the model's outputs, so that nothing was learnt; see whether "
            "`loss`, targets and outputs fit"
        )


def read_result(start: EagerModel, job: Job) -> Fit:
    """Read a finished training's last checkpoint, and the weights of its best one."""
    last = newest_intact(job.folder)
    progress = read_progress(last) if last else TrainProgress()
    if progress.kept is None or not is_finished(job.training, progress.history, job.metric):
        raise StageFailed(
            f"{job.folder} has no checkpoint of the end of the training; run again to resume it"
        )
    weights: Weights = read_safetensors(start.payload_path)
    if progress.kept_in:
        checkpoint = job.folder / FOLDER / progress.kept_in
        require_intact(checkpoint)
        trained = read_state_dict(checkpoint)
        dtypes = {name: weight.dtype for name, weight in weights.items()}
        weights = {
            # With `bf16-true` they are narrower than those of the input model.
            name: widened(weight, dtypes.get(name, weight.dtype))
            for name, weight in trained.items()
            if not name.startswith(AUXILIARY_PREFIX)
        }
    return Fit(start, weights, progress.history, progress.kept, progress.layouts)


def widened(weight: torch.Tensor | StoredTensor, dtype: torch.dtype) -> torch.Tensor | StoredTensor:
    """Return a weight in another type, still to be read if it is on disk."""
    if weight.dtype == dtype:
        return weight
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    read = weight.read
    return replace(weight, dtype=dtype, read=lambda: read().to(dtype))
