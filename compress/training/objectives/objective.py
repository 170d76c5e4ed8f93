"""The loss that training minimizes, how much a teacher counts beside labels, and constraints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypeAlias

from pydantic import Field

from compress.common.config import Positive, Settings
from compress.common.errors import StageFailed
from compress.common.lazy_modules import torch
from compress.core.objectives.loss import INFERRED_LOSS, Loss
from compress.core.objectives.task import infer_loss

if TYPE_CHECKING:
    from torch import nn

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


def label_count(loss: LossFunction, batch: Batch) -> torch.Tensor | None:
    """Return the number that the mean over a batch is divided by; None for all samples.

    A loss function has the method ``label_count(batch)`` if its mean is over the labels that are
    not ignored. It follows from the targets alone, and whether it is None from their dtype: it is
    needed before the forward pass, in all processes.
    """
    counter: Callable[[Batch], torch.Tensor | None] | None = getattr(loss, "label_count", None)
    return counter(batch) if counter else None


def attach_(loss: LossFunction, module: torch.nn.Module, example: Callable[[], Batch]) -> None:
    """Register the hooks and auxiliary weights of a loss function on the whole module, in place.

    It has the method ``attach_(module, example)`` if it reads intermediate features, or trains
    weights beside the module's: under names with :data:`AUXILIARY_PREFIX`, so that gradients,
    optimizer and checkpoints include them. The example is the same in every process.
    """
    if attach := getattr(loss, "attach_", None):
        attach(module, example())


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


class Teaching(Settings):
    """How much a model learns from a teacher's outputs, and how much from labels."""

    loss: Literal["kl", "mse", "cosine"] = "kl"
    """Distance between the outputs: `kl` compares the distributions of logits, `mse` and `cosine`
    compare outputs of other kinds, such as embeddings."""
    temperature: Positive = 4.0
    """Divisor of both models' logits before `kl` compares their distributions."""
    soft_weight: Positive = 0.9
    """Weight of the distance to the teacher's outputs."""
    hard_weight: Annotated[float, Field(ge=0)] | None = None
    """Weight of the pipeline's loss on the targets; 0 leaves them out, and samples without a label
    add nothing. By default 0.1 beside `kl`, and 0 beside the others, whose outputs are no
    logits."""

    @property
    def labels_weight(self) -> float:
        """The weight of the labels, with the default that belongs to the loss."""
        if self.hard_weight is None:
            return 0.1 if self.loss == "kl" else 0.0
        return self.hard_weight

    def check_loss(self, loss: Loss) -> None:
        """Refuse `kl` for a task without classes."""
        if self.loss == "kl":
            need_task_of_classes(self.loss, loss)


def need_task_of_classes(term: str, loss: Loss) -> None:
    """Refuse a comparison of class probabilities for regression and for independent labels."""
    name = loss.name or infer_loss(loss.targets, loss.task)
    if loss.is_regression or name == "binary_cross_entropy":
        raise StageFailed(
            f"loss: {term} compares probabilities of classes that exclude each other, and the "
            f"model of a pipeline with loss: {name} has none; use loss: mse"
        )


class Constraint(Protocol):
    """A rule for weights, as immutable data that can be pickled.

    It keeps no state: everything follows from the weights and the step, so that a resumed training,
    and each of several processes, does the same. Its ``repr`` is part of the training's identity
    and must name all that changes its effect. It needs unsharded weights.
    """

    def around(self, module: nn.Module, step: int, steps: int) -> AbstractContextManager[None]:
        """Return the context around an optimizer step, which corrects the weights at its end.

        ``step`` is counted from 0 over all ``steps`` of the training.
        """
        ...

    def is_met(self, share: float) -> bool:
        """Whether weights after this share of all steps may become the result."""
        ...


@dataclass(frozen=True)
class KeepZeros:
    """Keeps zeros of weights, by masked gradients and restored values."""

    tensors: tuple[str, ...] = ()
    """Names of the weights; all matrices and kernels where empty."""

    @contextmanager
    def around(self, module: nn.Module, step: int, steps: int) -> Iterator[None]:
        """Context around the optimizer's step: mask gradients before it, restore zeros after it."""
        weights = weights_of(module, self.tensors)
        zeros = {name: weight == 0 for name, weight in weights.items()}
        for name, weight in weights.items():
            if weight.grad is not None:
                weight.grad.masked_fill_(zeros[name], 0)
        yield
        set_zeros_(weights, zeros)

    def is_met(self, share: float) -> bool:
        """Always: the zeros exist from the beginning."""
        return True


def weights_of(module: nn.Module, tensors: tuple[str, ...]) -> dict[str, nn.Parameter]:
    """Return the named weights of a module; all matrices and kernels where none is named."""
    parameters = dict(module.named_parameters())
    names = tensors or [name for name, weight in parameters.items() if weight.ndim > 1]
    return {name: parameters[name] for name in names}


def set_zeros_(weights: Mapping[str, torch.Tensor], zeros: Mapping[str, torch.Tensor]) -> None:
    """Set entries of weights to zero, in place."""
    for name, where in zeros.items():
        weights[name].detach().masked_fill_(where, 0)
