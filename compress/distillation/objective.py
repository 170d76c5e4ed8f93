"""The objective of distillation: the teacher answers each batch beside the student."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path  # noqa: TC003 - a dataclass field
from typing import TYPE_CHECKING

import torch

from compress.core.eager import EagerModel, flatten_outputs
from compress.core.errors import StageFailed
from compress.distillation.losses import distillation_loss

if TYPE_CHECKING:
    from compress.core.data import Batch
    from compress.training.objective import LossFunction


@dataclass(frozen=True)
class FromTeacher:
    """Nearness of the first output to the teacher's, and to the labels where there are any."""

    teacher: Path = field(repr=False)
    """Directory of the teacher; each process loads it there."""
    teacher_digest: str
    temperature: float
    soft_weight: float
    hard_weight: float
    label_smoothing: float
    class_weights: tuple[float, ...] | None = None

    def prepare(self, device: str) -> LossFunction:
        """Load the teacher and return the loss function."""
        teacher = EagerModel.at(self.teacher).load(device).requires_grad_(False)
        weights = torch.tensor(self.class_weights, device=device) if self.class_weights else None

        def loss(outputs: tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
            with torch.no_grad():
                taught = flatten_outputs(teacher(*batch.inputs))[0]
            if taught.shape != outputs[0].shape:
                raise StageFailed(
                    f"the teacher's output has shape {tuple(taught.shape)} and the model's "
                    f"{tuple(outputs[0].shape)}; name a teacher with the same outputs"
                )
            return distillation_loss(
                outputs[0],
                taught,
                batch.target,
                temperature=self.temperature,
                soft_weight=self.soft_weight,
                hard_weight=self.hard_weight,
                label_smoothing=self.label_smoothing,
                class_weights=weights,
            )

        return loss
