"""What training makes small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from compress.core.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from compress.core.data import Batch

LossFunction: TypeAlias = "Callable[[tuple[torch.Tensor, ...], Batch], torch.Tensor]"
"""The model's flattened outputs and the batch → a scalar."""


class Objective(Protocol):
    """A loss before it holds tensors: small, immutable, able to travel to another process.

    Its ``repr`` must name all that changes the loss: training resumes only under an equal one.
    """

    def prepare(self, device: str) -> LossFunction:
        """Return the loss function, with whatever it needs on the device."""
        ...


@dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of the first output with the targets."""

    label_smoothing: float = 0.0

    def prepare(self, device: str) -> LossFunction:
        """Return the loss function."""
        import torch.nn.functional as F

        def loss(outputs: tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
            if batch.target is None:
                raise StageFailed(
                    "cross-entropy needs targets and split 'train' has none; "
                    "return (x, y) samples from the data factory, or distill from a teacher"
                )
            return F.cross_entropy(outputs[0], batch.target, label_smoothing=self.label_smoothing)

        return loss
