"""Constraint: what weights must satisfy in every step of a training, such as zeros that stay."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import nn

Hold: TypeAlias = "Callable[[int], AbstractContextManager[None]]"
"""The number of a step → what the optimizer's step is taken in."""


class Constraint(Protocol):
    """A rule before it meets a module: small, immutable, able to travel to another process.

    It keeps no state: all that it needs to know follows from the weights and the step, so that a
    resumed training, and each process of a spread one, does the same. Its ``repr`` must name all
    that changes what it does. It sees whole weights, which strategies that shard them do not have.
    """

    def around(self, module: nn.Module, step: int, steps: int) -> AbstractContextManager[None]:
        """Clip gradients and take the optimizer's step in a block; mend the weights after it.

        Args:
            module: the module, whose gradients are there.
            step: counted from 0 over the whole training.
            steps: steps of the whole training.
        """
        ...

    def is_met(self, share: float) -> bool:
        """Whether weights can be the result after this share of the steps."""
        ...


def free(step: int) -> AbstractContextManager[None]:
    """Return what a step is taken in where there is no constraint."""
    return nullcontext()


def held(constraint: Constraint | None, module: nn.Module, steps: int) -> Hold:
    """Return what each step of a training of so many steps is taken in."""
    if constraint is None:
        return free
    return lambda step: constraint.around(module, step, steps)
