"""`Constraint`: what weights must satisfy after every step, such as pruned ones that stay zero."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn

StepContext: TypeAlias = "Callable[[int], AbstractContextManager[None]]"
"""The number of a step → the context around clipping and ``optimizer.step()``."""


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


def unconstrained(step: int) -> AbstractContextManager[None]:
    """Return an empty context."""
    return nullcontext()


def step_context_for(constraint: Constraint | None, module: nn.Module, steps: int) -> StepContext:
    """Return a function that gives the context of each step."""
    if constraint is None:
        return unconstrained
    return lambda step: constraint.around(module, step, steps)
