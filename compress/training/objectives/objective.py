"""What training makes small."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from compress.common.errors import StageFailed
from compress.core.loss import INFERRED_LOSS, Loss

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from compress.core.context import Context
    from compress.data.splits import Batch
    from compress.training.config.training import Training

    TargetMean = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

LossFunction: TypeAlias = "Callable[[tuple[torch.Tensor, ...], Batch], torch.Tensor]"
"""The model's flattened outputs and the batch → a scalar."""

BESIDE = "_beside_"
"""How the names of weights begin that are trained beside a model's own, and dropped in the end."""


class Objective(Protocol):
    """A loss before it holds tensors: small, immutable, able to travel to another process.

    Its ``repr`` must name all that changes the loss: training resumes only under an equal one.
    """

    def prepare(self, device: str) -> LossFunction:
        """Return the loss function, with whatever it needs on the device."""
        ...


@runtime_checkable
class Attaching(Protocol):
    """A loss function that sees more of the model than its outputs, or trains weights beside it."""

    def attach_(self, module: torch.nn.Module, example: Batch) -> None:
        """Give the module what the loss needs of it, in place, before it is wrapped or compiled.

        Weights are registered on the module itself, their names beginning with :data:`BESIDE`:
        gradients, optimizer and checkpoints then include them.

        Args:
            module: the whole module, with its weights.
            example: a few samples, the same in every process.
        """
        ...


def attach_(loss: object, module: torch.nn.Module, example: Callable[[], Batch]) -> None:
    """Give the module, in place, what a loss function needs of it, if it needs anything."""
    if isinstance(loss, Attaching):
        loss.attach_(module, example())


@dataclass(frozen=True)
class TargetLoss:
    """The task's loss of the first output against the targets."""

    label_smoothing: float | None = 0.0
    """None is the default of the loss."""
    class_weights: tuple[float, ...] | None = None
    loss: Loss = INFERRED_LOSS

    @classmethod
    def for_training(cls, training: Training, context: Context) -> TargetLoss:
        """Return the loss that a training's settings and the task make."""
        loss = context.loss.infer_targets(context.data)
        return cls(training.label_smoothing, training.class_weights, loss)

    def prepare(self, device: str) -> LossFunction:
        """Return the loss function."""
        mean = self.mean(device)

        def loss(outputs: tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
            if batch.target is None:
                raise StageFailed(
                    "a loss needs targets and split 'train' has none; return (x, y) samples from "
                    "the data factory, or distill from a teacher"
                )
            return mean(outputs[0], batch.target)

        return loss

    def mean(self, device: str, *, over_all: bool = False) -> TargetMean:
        """Return the mean loss of outputs and targets.

        Args:
            device: where outputs and targets are.
            over_all: divide by the number of all targets, instead of those that have a label.
        """
        import torch

        weights = self.class_weights
        return partial(
            self.loss.function(),
            class_weights=None if weights is None else torch.tensor(weights, device=device),
            label_smoothing=self.label_smoothing,
            over_all=over_all,
        )
