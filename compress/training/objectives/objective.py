"""`Objective`: the loss that training minimizes, and the one on labels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from compress.common.errors import StageFailed
from compress.core.objectives.loss import INFERRED_LOSS, Loss

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from compress.common.forward import Outputs
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.data.batch import Batch
    from compress.data.targets import Targets
    from compress.training.config.training import Training

    TargetMean = Callable[[Outputs, Targets], torch.Tensor]

LossFunction: TypeAlias = "Callable[[tuple[torch.Tensor, ...], Batch], torch.Tensor]"
"""The model's flattened outputs and the batch → the mean loss, a scalar."""

AUXILIARY_PREFIX = "_beside_"
"""Prefix of auxiliary weights, such as hints' projections: trained, but dropped from the result."""


class Objective(Protocol):
    """A loss as immutable data that can be pickled, without tensors.

    Its ``repr`` is part of the training's identity and must name all that changes the loss.
    """

    def prepare(self, device: str) -> LossFunction:
        """Return the loss function, with its tensors on the device."""
        ...


@runtime_checkable
class AttachesToModule(Protocol):
    """A loss function that reads intermediate features, or trains auxiliary weights."""

    def attach_(self, module: torch.nn.Module, example: Batch) -> None:
        """Register hooks and auxiliary weights on the whole module, in place.

        Weights are registered under names with :data:`AUXILIARY_PREFIX`, so that gradients,
        optimizer and checkpoints include them. ``example`` is the same in every process.
        """
        ...


@runtime_checkable
class CountsLabels(Protocol):
    """A loss function whose mean is not over samples, but over the labels that are not ignored."""

    def label_count(self, batch: Batch) -> torch.Tensor | None:
        """Return the number that the mean over a batch is divided by; None for all samples.

        It follows from the targets alone, and whether it is None from their dtype: it is needed
        before the forward pass, in all processes.
        """
        ...


def label_count(loss: object, batch: Batch) -> torch.Tensor | None:
    """Return the number of labels in a batch that count; None if every sample counts alike."""
    return loss.label_count(batch) if isinstance(loss, CountsLabels) else None


def attach_(loss: object, module: torch.nn.Module, example: Callable[[], Batch]) -> None:
    """Register what a loss function needs on the module, in place, if it needs anything."""
    if isinstance(loss, AttachesToModule):
        loss.attach_(module, example())


@dataclass(frozen=True)
class TargetLoss:
    """The pipeline's loss of the outputs against the targets."""

    label_smoothing: float | None = 0.0
    """None means the loss's own default."""
    class_weights: tuple[float, ...] | None = None
    loss: Loss = INFERRED_LOSS

    @classmethod
    def for_training(cls, training: Training, context: Context, signature: Signature) -> TargetLoss:
        """Create the loss of a model from a training's settings and the pipeline's `loss`."""
        loss = context.loss.for_model(signature).infer_targets(context.data)
        return cls(training.label_smoothing, training.class_weights, loss)

    def prepare(self, device: str) -> LossFunction:
        """Return the loss function."""
        return TargetLossFunction(self.mean(device), self.loss.function().label_count)

    def mean(self, device: str, *, over_all: bool = False) -> TargetMean:
        """Return a function of outputs and targets that gives the mean loss.

        With ``over_all`` the sum is divided by the number of all targets, unlabelled ones included.
        """
        import torch

        weights = self.class_weights
        return partial(
            self.loss.function(),
            class_weights=None if weights is None else torch.tensor(weights, device=device),
            label_smoothing=self.label_smoothing,
            over_all=over_all,
        )


@dataclass(frozen=True)
class TargetLossFunction:
    """The loss function of :class:`TargetLoss` in one process."""

    mean: TargetMean
    counter: Callable[[Targets], torch.Tensor | None]

    def __call__(self, outputs: tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
        """Compute the mean loss."""
        if batch.target is None:
            raise StageFailed(
                "a loss needs targets and a batch of split 'train' has none; return (x, y) samples "
                "from the data factory, or distill from a teacher"
            )
        return self.mean(outputs, batch.target)

    def label_count(self, batch: Batch) -> torch.Tensor | None:
        """Count the labels that are not ignored."""
        return None if batch.target is None else self.counter(batch.target)
