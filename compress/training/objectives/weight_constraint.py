"""`Constraint`: what weights must satisfy after every step, such as pruned ones that stay zero."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import nn


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


@torch.no_grad()
def set_zeros_(weights: Mapping[str, torch.Tensor], zeros: Mapping[str, torch.Tensor]) -> None:
    """Set entries of weights to zero, in place."""
    for name, where in zeros.items():
        weights[name].masked_fill_(where, 0)
