"""What training makes small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from compress.core.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from compress.core.data import Batch

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
class CrossEntropy:
    """Cross-entropy of the first output with the targets."""

    label_smoothing: float = 0.0
    class_weights: tuple[float, ...] | None = None

    def prepare(self, device: str) -> LossFunction:
        """Return the loss function."""
        import torch

        weights = torch.tensor(self.class_weights, device=device) if self.class_weights else None

        def loss(outputs: tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
            if batch.target is None:
                raise StageFailed(
                    "cross-entropy needs targets and split 'train' has none; "
                    "return (x, y) samples from the data factory, or distill from a teacher"
                )
            return cross_entropy(outputs[0], batch.target, weights, self.label_smoothing)

        return loss


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weights: torch.Tensor | None,
    label_smoothing: float,
) -> torch.Tensor:
    """Return the mean over samples of the cross-entropy, each weighted by its class.

    Not torch's weighted mean, which divides by the weights met in a batch: a step's loss would
    depend on how the step is shared out.

    Raises:
        StageFailed: there is not one weight for each class.
    """
    import torch.nn.functional as F

    if class_weights is None:
        return F.cross_entropy(logits, target, label_smoothing=label_smoothing)
    if len(class_weights) != logits.shape[1]:
        raise StageFailed(
            f"class_weights has {len(class_weights)} numbers and the model {logits.shape[1]} "
            "classes; give one for each"
        )
    total = F.cross_entropy(
        logits,
        target,
        weight=class_weights.to(logits.dtype),
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    return total / target.numel()
