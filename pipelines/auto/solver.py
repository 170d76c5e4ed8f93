"""The widths that lose least under limits, as a mixed-integer linear programme."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from export.latency.width_costs import PairwiseSum

    Widths = Mapping[str, int]
    Row = dict[int, float]

SECONDS = 10.0
"""Most time for one programme: on random ones, 50 groups of 16 widths took 9 s."""
GAP = 1e-4
"""Relative distance from the optimum at which the solver stops."""


@dataclass(frozen=True)
class Limit:
    """The most that a quantity may be."""

    quantity: PairwiseSum
    most: float


@dataclass(frozen=True)
class Programme:
    """Widths to choose for groups of channels, and how much each choice loses."""

    grid: Mapping[str, Sequence[int]]
    """Group → its widths."""
    harm: Mapping[str, Mapping[int, float]]
    """Group → width → what is lost where it is chosen; harms are assumed to add up."""

    def solve(
        self, limits: Sequence[Limit], forbidden: Iterable[Widths] = (), tie: float = 1e-6
    ) -> dict[str, int] | None:
        """Return the widths of least harm that meet all limits; None where none do.

        Args:
            limits: of quantities over the grid.
            forbidden: widths that are not returned, as they are known already.
            tie: weight of the first limit's quantity, relative to its most, in the harm, so that
                of two choices that lose the same the cheaper one is returned.
        """
        choices = [(group, width) for group, widths in self.grid.items() for width in widths]
        index = {choice: i for i, choice in enumerate(choices)}
        meetings = {
            (both, widths)
            for limit in limits
            for both, own in limit.quantity.pair.items()
            if any(own.values())
            for widths in product(self.grid[both[0]], self.grid[both[1]])
        }
        joint = {meeting: len(choices) + i for i, meeting in enumerate(sorted(meetings))}
        count = len(choices) + len(joint)
        rows: list[Row] = []
        lows: list[float] = []
        highs: list[float] = []

        def constrain(row: Row, low: float, high: float) -> None:
            rows.append(row)
            lows.append(low)
            highs.append(high)

        for group, widths in self.grid.items():
            constrain({index[group, width]: 1.0 for width in widths}, 1, 1)
        for a, b in sorted({both for both, _ in joint}):
            for x in self.grid[a]:
                row = {joint[(a, b), (x, y)]: 1.0 for y in self.grid[b]}
                constrain({**row, index[a, x]: -1.0}, 0, 0)
            for y in self.grid[b]:
                row = {joint[(a, b), (x, y)]: 1.0 for x in self.grid[a]}
                constrain({**row, index[b, y]: -1.0}, 0, 0)
        costs = [self._row(limit.quantity, index, joint) for limit in limits]
        for limit, row in zip(limits, costs, strict=True):
            # In shares of what is allowed, so that bytes and seconds weigh the same.
            scale = abs(limit.most) or 1.0
            room = (limit.most - limit.quantity.whole) / scale
            constrain({i: value / scale for i, value in row.items()}, -np.inf, room)
        for tried in forbidden:
            if all(choice in index for choice in tried.items()):
                constrain({index[choice]: 1.0 for choice in tried.items()}, -np.inf, len(tried) - 1)
        objective = np.zeros(count)
        for (group, width), i in index.items():
            objective[i] = self.harm[group][width]
        if limits:
            for i, value in costs[0].items():
                objective[i] += tie * value / (abs(limits[0].most) or 1.0)
        found = milp(
            objective,
            integrality=np.array([1] * len(choices) + [0] * len(joint)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(_matrix(rows, count), np.array(lows), np.array(highs)),
            options={"time_limit": SECONDS, "mip_rel_gap": GAP},
        )
        if found.x is None:
            return None
        return {group: width for (group, width), i in index.items() if found.x[i] > 0.5}

    def total_harm(self, widths: Widths) -> float:
        """Return what some widths lose together, as the programme assumes."""
        return sum(self.harm[group][width] for group, width in widths.items())

    @staticmethod
    def _row(
        quantity: PairwiseSum,
        index: Mapping[tuple[str, int], int],
        joint: Mapping[tuple[tuple[str, str], tuple[int, int]], int],
    ) -> Row:
        row = {index[g, w]: value for g, own in quantity.single.items() for w, value in own.items()}
        for both, own in quantity.pair.items():
            for widths, value in own.items():
                if (both, widths) in joint:
                    row[joint[both, widths]] = value
        return row


def _matrix(rows: Sequence[Row], columns: int) -> csr_array:
    values = [value for row in rows for value in row.values()]
    places = [i for row in rows for i in row]
    ends = np.cumsum([0, *(len(row) for row in rows)])
    return csr_array((values, places, ends), shape=(len(rows), columns))
