"""The widths and formats that lose least under limits, as a mixed-integer linear programme."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_array

if TYPE_CHECKING:
    from compress.profiling.interaction_sum import Choice, InteractionSum, Value

    Row = dict[int, float]
    Meeting = tuple[tuple[str, ...], tuple[Value, ...]]

MOST_SECONDS = 10.0  # most time for one programme: on random ones, 50 groups of 16 widths took 9 s
OPTIMALITY_GAP = 1e-4  # relative distance from the optimum at which the solver stops


@dataclass(frozen=True)
class Limit:
    """The most that a quantity may be."""

    quantity: InteractionSum
    most: float


@dataclass(frozen=True)
class Programme:
    """Widths of groups of channels and formats of layers to choose, and how much each loses."""

    grid: Mapping[str, Sequence[Value]]
    """Decision → its values."""
    loss_increase: Mapping[str, Mapping[Any, float]]
    """Decision → value → what is lost where it is chosen; losses are assumed to add up."""

    def solve(
        self, limits: Sequence[Limit], forbidden: Iterable[Choice] = (), tie: float = 1e-6
    ) -> dict[str, Value] | None:
        """Return the values of least loss that meet all limits; None where none do.

        Choices that are ``forbidden`` are known already. ``tie`` weighs the first limit's quantity,
        relative to its most, in the loss, so that of equal choices the cheaper one is returned.
        """
        # Pruning without a target of latency solves none: half of its imports.
        from scipy.optimize import Bounds, LinearConstraint, milp

        choices = [(decision, value) for decision, own in self.grid.items() for value in own]
        index = {choice: i for i, choice in enumerate(choices)}
        meeting = {
            scope
            for limit in limits
            for scope, own in limit.quantity.terms.items()
            if len(scope) > 1 and any(own.values())
        }
        scopes: list[tuple[str, ...]] = []  # those that are not in a larger one
        for scope in sorted(meeting, key=lambda scope: (-len(scope), scope)):
            if not any({*scope} <= {*larger} for larger in scopes):
                scopes.append(scope)
        # A variable for each combination of values of decisions that meet, between 0 and 1: sums
        # over those with one value are that value's own variable, and so it is their product.
        joint: dict[Meeting, int] = {}
        for scope in scopes:
            for values in product(*(self.grid[decision] for decision in scope)):
                joint[scope, values] = len(choices) + len(joint)
        count = len(choices) + len(joint)
        constraints: list[tuple[Row, float, float]] = [  # row, low, high
            ({index[decision, value]: 1.0 for value in own}, 1, 1)
            for decision, own in self.grid.items()
        ]
        for scope in scopes:
            for place, decision in enumerate(scope):
                margins: dict[Value, Row] = {
                    value: {index[decision, value]: -1.0} for value in self.grid[decision]
                }
                for values in product(*(self.grid[other] for other in scope)):
                    margins[values[place]][joint[scope, values]] = 1.0
                constraints += [(row, 0, 0) for row in margins.values()]
        costs = [self._row(limit.quantity, index, scopes, joint) for limit in limits]
        for limit, row in zip(limits, costs, strict=True):
            # In shares of what is allowed, so that bytes and seconds weigh the same.
            scale = abs(limit.most) or 1.0
            room = (limit.most - limit.quantity.base) / scale
            constraints.append(({i: cost / scale for i, cost in row.items()}, -np.inf, room))
        for tried in forbidden:
            if all(choice in index for choice in tried.items()):
                row = {index[choice]: 1.0 for choice in tried.items()}
                constraints.append((row, -np.inf, len(tried) - 1))
        objective = np.zeros(count)
        for (decision, value), i in index.items():
            objective[i] = self.loss_increase[decision][value]
        if limits:
            for i, cost in costs[0].items():
                objective[i] += tie * cost / (abs(limits[0].most) or 1.0)
        rows, lows, highs = zip(*constraints, strict=True)
        entries = [entry for row in rows for entry in row.values()]
        ends = np.cumsum([0, *map(len, rows)])
        matrix = csr_array((entries, [i for row in rows for i in row], ends), (len(rows), count))
        found = milp(
            objective,
            integrality=np.array([1] * len(choices) + [0] * len(joint)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(matrix, np.array(lows), np.array(highs)),
            options={"time_limit": MOST_SECONDS, "mip_rel_gap": OPTIMALITY_GAP},
        )
        if found.x is None:
            return None
        return {decision: value for (decision, value), i in index.items() if found.x[i] > 0.5}

    def total_loss_increase(self, choice: Choice) -> float:
        """Return what some values lose together, as the programme assumes."""
        return sum(self.loss_increase[decision][value] for decision, value in choice.items())

    def extended(
        self, grid: Mapping[str, Sequence[Value]], loss_increase: Mapping[str, Mapping[Any, float]]
    ) -> Programme:
        """Return a programme of more decisions."""
        return Programme({**self.grid, **grid}, {**self.loss_increase, **loss_increase})

    def _row(
        self,
        quantity: InteractionSum,
        index: Mapping[tuple[str, Value], int],
        scopes: Sequence[tuple[str, ...]],
        joint: Mapping[Meeting, int],
    ) -> Row:
        row: Row = {}
        for scope, own in quantity.terms.items():
            if len(scope) == 1:
                row |= {index[scope[0], value]: change for (value,), change in own.items()}
                continue
            around = next((one for one in scopes if {*scope} <= {*one}), None)
            if around is None:  # all of its changes are 0
                continue
            places = [around.index(decision) for decision in scope]
            for values in product(*(self.grid[decision] for decision in around)):
                change = own.get(tuple(values[place] for place in places), 0.0)
                if change:
                    column = joint[around, values]
                    row[column] = row.get(column, 0.0) + change
        return row
