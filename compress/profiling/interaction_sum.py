"""A quantity of a model as a sum over the decisions by which it was changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    Value = int | str
    """A number of channels, or the format of a layer."""
    Choice = Mapping[str, Value]
    """Decision, such as a group of channels → the value that is chosen."""


@dataclass(frozen=True)
class InteractionSum:
    """A quantity of a model as a sum of what single decisions, and few of them together, add to it.

    A kernel's cost depends on the channels that it reads, on those that it writes and on its
    format, so on three decisions at most, in all but joins of several branches; then the sum is
    exact. It is the decomposition of high-dimensional model representation around one point (Rabitz
    and Aliş, "General foundations of high-dimensional model representations", 1999).
    """

    base: float
    """Where each decision has its first value: the model's own widths, no layer in float."""
    terms: Mapping[tuple[str, ...], Mapping[tuple[Value, ...], float]]
    """Decisions → values other than the first → what changes where all of them have these values,
    beyond the changes of fewer of them."""

    def __call__(self, choice: Choice) -> float:
        """Return the quantity at some values of the grid."""
        return self.base + sum(
            own.get(tuple(choice[decision] for decision in scope), 0.0)
            for scope, own in self.terms.items()
        )

    @classmethod
    def combine(cls, parts: Sequence[tuple[float, InteractionSum]], constant: float) -> Self:
        """Return a weighted sum of quantities of one grid, and a constant."""
        terms: dict[tuple[str, ...], dict[tuple[Value, ...], float]] = {}
        for factor, part in parts:
            for scope, own in part.terms.items():
                summed = terms.setdefault(scope, {})
                for values, change in own.items():
                    summed[values] = summed.get(values, 0.0) + factor * change
        return cls(constant + sum(f * part.base for f, part in parts), terms)
