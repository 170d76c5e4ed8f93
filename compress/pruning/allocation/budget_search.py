"""Search the verified slices whose cost is nearest to a target and not above it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from compress.common.errors import StageFailed
from compress.data.batch import Batch
from compress.graph.flops import count_macs
from compress.pruning.importance.layer_calls import LayerCall, observe_layer_calls

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    import torch
    from torch import nn

    from compress.pruning.allocation.ranking import OnUnverified, Ranking
    from compress.pruning.allocation.ratios import Limits
    from compress.pruning.dependency.channel_groups import AxisGraph, SlicePlan

# 20 halvings separate ratios that differ by 1e-6: no group has more channels than that.
BISECTIONS = 20
ATTEMPTS = 6
"""Plans that are verified and measured, at most."""
FILLS = 8
"""Smaller ratios from which single groups are given back channels that still fit."""
MAX_RATIO = 0.99
"""Largest fraction of channels that is tried."""


@dataclass(frozen=True)
class CostEstimate:
    """A cost as a sum over weights, each in proportion to its size, and a constant rest."""

    graph: AxisGraph
    shapes: Mapping[str, tuple[int, ...]]
    per_entry: Mapping[str, float]
    """Weight → cost of each of its entries."""
    rest: float

    def without(self, removed: Iterable[int]) -> float:
        """Estimate the cost after some channels are removed."""
        kept = self.graph.kept(removed)
        total = self.rest
        for name, shape in self.shapes.items():
            axes = {axis: len(indices) for axis, indices in kept.get(name, {}).items()}
            total += self.per_entry[name] * prod(axes.get(i, n) for i, n in enumerate(shape))
        return total


def parameters_of(module: nn.Module) -> int:
    """Count a module's weights, tied ones once."""
    return sum(p.numel() for p in module.parameters())


def parameter_estimate(module: nn.Module, graph: AxisGraph) -> CostEstimate:
    """Build the estimate of a module's number of weights, which is exact."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    return CostEstimate(graph, shapes, dict.fromkeys(shapes, 1.0), 0.0)


def mac_estimate(
    module: nn.Module, graph: AxisGraph, inputs: Sequence[torch.Tensor]
) -> CostEstimate:
    """Build the estimate of a module's multiply-accumulates; products of attention are constant."""
    positions: dict[str, float] = {}

    def count_positions(call: LayerCall) -> None:
        axis = call.channel_axis
        count = call.output.numel() / call.output.shape[axis] / len(inputs[0])
        positions[call.weight] = positions.get(call.weight, 0.0) + count

    batch = Batch(tuple(inputs), None)
    observe_layer_calls(copy.deepcopy(module), [batch], count_positions, "cpu")
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if name in positions}
    known = sum(positions[name] * prod(shape) for name, shape in shapes.items())
    rest = max(0.0, count_macs(module, inputs) - known)
    return CostEstimate(graph, shapes, positions, rest)


def plan_for_cost(
    ranking: Ranking,
    limits: Limits,
    goal: float,
    estimate: CostEstimate,
    measure: Callable[[SlicePlan], float],
    on_unverified: OnUnverified = "pin",
) -> SlicePlan:
    """Return a verified plan that costs at most ``goal``, and as near to it as rounding allows.

    An estimate guides the search and is corrected by the measured cost of the plans it leads to.

    Args:
        ranking: the groups.
        limits: constraints on the channels kept.
        goal: the cost not to be exceeded.
        estimate: estimates the cost without some channels.
        measure: measures the cost of a verified plan.
        on_unverified: whether a group that cannot be verified is an error.

    Raises:
        StageFailed: the largest slices still cost more.
    """
    plan_of_cost: dict[float, SlicePlan] = {}
    errors: dict[tuple[int, ...], float] = {}
    """Channels kept → measured cost minus estimate."""

    def estimated(keep: Sequence[int]) -> float:
        return estimate.without(channel for own in ranking.removed(keep) for channel in own)

    for _ in range(ATTEMPTS):
        keep = _next_counts(ranking, limits, goal, estimated, list(errors.values()), set(errors))
        if keep is None:
            break
        plan = ranking.verify(keep, on_unverified)
        verified = {one.group for one in plan.groups}
        unverified = {
            one.group.name
            for one, count in zip(ranking.ranked, keep, strict=True)
            if count < len(one.scores) and one.group not in verified
        }
        if unverified:
            ranking, errors = ranking.without(unverified, plan.pinned), {}
            continue
        cost = measure(plan)
        plan_of_cost[cost] = plan
        errors[keep] = cost - estimated(keep)
    return _nearest(plan_of_cost, goal)


def plan_for_latency(
    ranking: Ranking,
    limits: Limits,
    goal: float,
    measure: Callable[[SlicePlan], float],
    on_unverified: OnUnverified = "pin",
) -> SlicePlan:
    """Return a verified plan that was measured to take at most ``goal``, among a few candidates.

    Whole models are measured: the sum of its layers' times is a poor estimate of a model's.

    Args:
        ranking: the groups.
        limits: constraints on the channels kept.
        goal: the share of the unpruned model's latency.
        measure: measures a verified plan's latency over the unpruned model's.
        on_unverified: whether a group that cannot be verified is an error.

    Raises:
        StageFailed: none of the candidates is fast enough.
    """
    latency_of: dict[tuple[int, ...], float] = {}
    plan_of_latency: dict[float, SlicePlan] = {}
    low, high = 0.0, MAX_RATIO
    for attempt in range(ATTEMPTS):
        # Start near the goal; if that is too slow, bisect up to the largest ratio.
        ratio = min(1 - goal, MAX_RATIO) if attempt == 0 else (low + high) / 2
        keep = tuple(ranking.allocate(ratio, limits))
        if keep not in latency_of:
            plan = ranking.verify(keep, on_unverified)
            latency_of[keep] = measure(plan)
            plan_of_latency[latency_of[keep]] = plan
        low, high = (low, ratio) if latency_of[keep] <= goal else (ratio, high)
    return _nearest(plan_of_latency, goal)


def _next_counts(
    ranking: Ranking,
    limits: Limits,
    goal: float,
    estimated: Callable[[Sequence[int]], float],
    errors: Sequence[float],
    tried: Collection[tuple[int, ...]],
) -> tuple[int, ...] | None:
    """Return the largest untried counts that should reach a goal, or None.

    The estimate is corrected by its last error; if that leads to counts that were tried, by its
    largest.
    """
    for correction in (errors[-1], max(errors)) if errors else (0.0,):
        keep = tuple(_largest_counts(ranking, limits, goal, estimated, correction))
        if keep not in tried:
            return keep
    return None


def _largest_counts(
    ranking: Ranking,
    limits: Limits,
    goal: float,
    estimated: Callable[[Sequence[int]], float],
    correction: float,
) -> list[int]:
    """Return the counts with the largest cost not above a goal, or the smallest there are.

    Groups are rounded in steps, and often all at the same ratio. So channels that smaller ratios
    would keep are given back, group by group, as far as they fit.
    """
    low, high = 0.0, MAX_RATIO
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if correction + estimated(ranking.allocate(middle, limits)) <= goal:
            high = middle
        else:
            low = middle
    keep = ranking.allocate(high, limits)
    for step in range(FILLS):
        for i, count in enumerate(ranking.allocate(low * (1 - step / FILLS), limits)):
            with_more = [*keep[:i], count, *keep[i + 1 :]]
            if count > keep[i] and correction + estimated(with_more) <= goal:
                keep = with_more
    return keep


def _nearest(plan_of_cost: dict[float, SlicePlan], goal: float) -> SlicePlan:
    reached = [cost for cost in plan_of_cost if cost <= goal]
    if not reached:
        smallest = (
            f"the smallest that was found is {min(plan_of_cost):.4g}"
            if plan_of_cost
            else "no slice is verified"
        )
        raise StageFailed(
            f"the target of {goal:.4g} cannot be reached: {smallest}; ask for more to remain, or "
            "lower round_to, min_channels or what is excluded"
        )
    return plan_of_cost[max(reached)]
