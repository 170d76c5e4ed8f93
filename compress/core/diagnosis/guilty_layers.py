"""Search for the few layers that cause a loss, by putting layers back to float.

The smallest prefix of a ranking is bisected, and reduced after Zeller and Hildebrandt, "Simplifying
and Isolating Failure-Inducing Input" (2002): a layer stays in the set only if the set without it
recovers less.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_SHARE = 0.25
"""Of the layers: a loss to which more of them contribute is spread over the model."""
LEAST_RECOVERED = 0.5
"""Share of the loss that the set must return."""
SLACK = 0.05
"""Share of the loss within which two sets return the same."""
LEAST_ALONE = 0.1
"""Share of the loss that is enough for a layer to cost when it is rounded alone, all others in
float; as much as the gate allows is enough too."""


def most_judgings(layers: int) -> int:
    """Return how many models may be judged for one loss."""
    return int(3 * math.log2(max(layers, 2))) + 10


@dataclass(frozen=True)
class Judged:
    """Layers that were put back to float, and the share of the loss that returned."""

    layers: tuple[str, ...]
    recovered: float


@dataclass
class GuiltSearch:
    """A search among ranked layers."""

    ranking: Sequence[str]
    """All layers, the likeliest first."""
    drop: Callable[[frozenset[str]], float]
    """Measures the points lost with some layers in float."""
    wanted: float = 0.0
    """Share of the loss that must return so that the gate passes."""
    least_points: float = math.inf
    """Points that are enough for a layer to cost alone."""
    reserve: int = 8
    """Judgings that are left for the causes."""
    deadline: float = math.inf
    """On the clock of :func:`time.monotonic`; after it the set is not reduced further."""
    judged: list[Judged] = field(default_factory=list)
    _drops: dict[frozenset[str], float] = field(default_factory=dict)

    @property
    def judgings(self) -> int:
        """How many models were judged."""
        return len(self._drops)

    @property
    def budget(self) -> int:
        """How many more may be judged."""
        if time.monotonic() > self.deadline:
            return 0
        return most_judgings(len(self.ranking)) - self.reserve - self.judgings

    def points(self, layers: frozenset[str]) -> float:
        """Return the points lost with some layers in float, measured once."""
        if layers not in self._drops:
            self._drops[layers] = self.drop(layers)
        return self._drops[layers]

    @property
    def lost(self) -> float:
        """Points that rounding loses: those of all layers rounded, less those of none."""
        return self.points(frozenset()) - self.points(frozenset(self.ranking))

    def share_returned(self, points: float) -> float:
        """Return the share of the loss that is mended where so many points are lost.

        A model without a finite metric has lost infinitely many.
        """
        if not (math.isfinite(points) and math.isfinite(self.lost)):
            return 1.0 if math.isfinite(points) else 0.0
        return (self.points(frozenset()) - points) / self.lost

    def recovered(self, layers: Sequence[str]) -> float:
        """Return the share of the loss that returns with some layers in float."""
        known = frozenset(layers) in self._drops
        share = self.share_returned(self.points(frozenset(layers)))
        if not known:
            self.judged.append(Judged(tuple(layers), share))
        return share

    def alone(self, layer: str) -> float:
        """Return the share of the loss that a layer costs when all others are in float."""
        others = frozenset(self.ranking) - {layer}
        return 1 - self.share_returned(self.points(others))

    def known_alone(self) -> dict[str, float]:
        """Return what layers cost alone, of those that were judged so."""
        every = frozenset(self.ranking)
        return {layer: self.alone(layer) for layer in every if every - {layer} in self._drops}

    def smallest_prefix(self, most: int, wanted: float) -> int:
        """Bisect how many of the first layers return a share of the loss; 0 where none do."""
        if self.recovered(self.ranking[:most]) < wanted - SLACK:
            return 0
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            enough = self.recovered(self.ranking[:middle]) >= wanted - SLACK
            low, high = (low, middle) if enough else (middle, high)
        return high

    def widest(self) -> tuple[str, ...]:
        """Return the first layers that return half of the loss, however many they are."""
        return tuple(self.ranking[: self.smallest_prefix(len(self.ranking), LEAST_RECOVERED)])

    def guilty(self) -> tuple[str, ...]:
        """Return the smallest set that was found, worst first; empty where the loss is spread."""
        most = max(1, math.ceil(MOST_SHARE * len(self.ranking)))
        all_of_these = self.recovered(self.ranking[:most])
        if all_of_these < LEAST_RECOVERED:
            return ()
        wanted = max(LEAST_RECOVERED, min(all_of_these, self.wanted or all_of_these))
        found = list(self.ranking[: self.smallest_prefix(most, wanted)])
        # Leave out halves, quarters, … and single layers without which as much returns.
        size = len(found) // 2
        while size >= 1 and len(found) > 1:
            start = len(found) - size
            while start >= 0 and self.budget > len(found):
                fewer = found[:start] + found[start + size :]
                if fewer and self.recovered(fewer) >= wanted - SLACK:
                    found = fewer
                start -= size
            size //= 2
        costs = {layer: self.alone(layer) for layer in found if self.budget > 0}
        least = min(LEAST_ALONE, self.least_points / self.lost)
        kept = [layer for layer in found if costs.get(layer, 1.0) >= least]
        # Layers whose errors only add up each cost little alone; together they are the cause.
        if kept and len(kept) < len(found) and self.recovered(kept) < wanted - SLACK:
            kept = found
        return tuple(sorted(kept or found, key=lambda layer: -costs.get(layer, 0.0)))
