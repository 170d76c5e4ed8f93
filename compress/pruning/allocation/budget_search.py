"""Search the verified slices whose cost is nearest to a target and not above it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

from compress.common.errors import StageFailed
from compress.common.forward import copy_module
from compress.data.batch import Batch
from compress.graph.flops import count_macs
from compress.pruning.importance.layer_calls import record_layer_calls
from compress.pruning.verification.masked_equivalence import sliced_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import nn

    from compress.pruning.allocation.ranking import Ranking
    from compress.pruning.channel_settings import ChannelSelection
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

    def without(self, removed: Iterable[Iterable[int]]) -> float:
        """Estimate the cost after some channels of each group are removed."""
        kept = self.graph.kept(chain.from_iterable(removed))
        total = self.rest
        for name, shape in self.shapes.items():
            axes = {axis: len(indices) for axis, indices in kept.get(name, {}).items()}
            total += self.per_entry[name] * prod(axes.get(i, n) for i, n in enumerate(shape))
        return total


def parameter_estimate(module: nn.Module, graph: AxisGraph) -> CostEstimate:
    """Build the estimate of a module's number of weights, which is exact."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    return CostEstimate(graph, shapes, dict.fromkeys(shapes, 1.0), 0.0)


def mac_estimate(
    module: nn.Module, graph: AxisGraph, inputs: Sequence[torch.Tensor]
) -> CostEstimate:
    """Build the estimate of a module's multiply-accumulates; products of attention are constant."""
    positions: dict[str, float] = {}
    calls, _ = record_layer_calls(copy_module(module), Batch(tuple(inputs), None), "cpu")
    for call in calls:
        count = call.output.numel() / call.output.shape[call.channel_axis] / len(inputs[0])
        positions[call.weight] = positions.get(call.weight, 0.0) + count
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if name in positions}
    known = sum(positions[name] * prod(shape) for name, shape in shapes.items())
    rest = max(0.0, count_macs(module, inputs) - known)
    return CostEstimate(graph, shapes, positions, rest)


def plan_for_target(
    ranking: Ranking,
    selection: ChannelSelection,
    goal: float,
    measure: Callable[[nn.Module], float],
    build_estimate: Callable[[nn.Module, AxisGraph], CostEstimate] | None = None,
) -> SlicePlan:
    """Return the verified plan whose measured cost is nearest to ``goal`` and not above it.

    Counts of channels are searched by an estimate of the cost; without one, as for latency, among a
    few ratios.

    Raises:
        StageFailed: no plan reaches the goal, or a group cannot be verified and
            ``selection.on_unverified`` is ``"error"``.
    """
    if build_estimate is not None:
        estimate = build_estimate(ranking.module, ranking.graph)
        plans = _plans_by_estimate(ranking, selection, goal, measure, estimate)
    else:
        plans = _plans_by_bisection(ranking, selection, goal, measure)
    plan_of_cost = dict(plans)
    reached = [cost for cost in plan_of_cost if cost <= goal]
    if not reached:
        smallest = "no slice is verified"
        if plan_of_cost:
            smallest = f"the smallest that was found is {min(plan_of_cost):.4g}"
        raise StageFailed(
            f"the target of {goal:.4g} cannot be reached: {smallest}; ask for more to remain, or "
            "lower round_to, min_channels or what is excluded"
        )
    return plan_of_cost[max(reached)]


def _plans_by_estimate(
    ranking: Ranking,
    selection: ChannelSelection,
    goal: float,
    measure: Callable[[nn.Module], float],
    estimate: CostEstimate,
) -> Iterator[tuple[float, SlicePlan]]:
    """Yield measured plans for the largest counts whose estimated cost is not above the goal."""
    errors: dict[tuple[int, ...], float] = {}
    """Channels kept → measured cost minus estimate."""
    for _ in range(ATTEMPTS):
        # The estimate is corrected by its last error; if that leads to counts that were tried, by
        # its largest.
        known = list(errors.values())
        candidates = (
            _largest_counts(ranking, selection, goal, estimate, correction)
            for correction in ((known[-1], max(known)) if known else (0.0,))
        )
        keep = next((counts for counts in candidates if counts not in errors), None)
        if keep is None:
            return
        plan = ranking.verify(keep, selection.on_unverified)
        verified = {one.group for one in plan.groups}
        unverified = {
            one.group.name
            for one, count in zip(ranking.ranked, keep, strict=True)
            if count < len(one.scores) and one.group not in verified
        }
        if unverified:
            # Counts are by group, so the errors of those tried so far are of no use.
            ranking, errors = ranking.without(unverified, plan.pinned), {}
            continue
        cost = measure(sliced_copy(ranking.module, plan.kept, plan.attributes))
        errors[keep] = cost - estimate.without(ranking.removed(keep))
        yield cost, plan


def _plans_by_bisection(
    ranking: Ranking,
    selection: ChannelSelection,
    goal: float,
    measure: Callable[[nn.Module], float],
) -> Iterator[tuple[float, SlicePlan]]:
    """Yield measured plans of ratios from the goal's to the largest."""
    # Whole models are measured, because the sum of its layers' times is a poor estimate of a
    # model's latency. Rounding often leads to the same counts again.
    cost_of: dict[tuple[int, ...], float] = {}
    low, high = 0.0, MAX_RATIO
    for attempt in range(ATTEMPTS):
        # Start near the goal; if that is too slow, bisect up to the largest ratio.
        ratio = min(1 - goal, MAX_RATIO) if attempt == 0 else (low + high) / 2
        keep = tuple(ranking.allocate(ratio, selection))
        if keep not in cost_of:
            plan = ranking.verify(keep, selection.on_unverified)
            cost_of[keep] = measure(sliced_copy(ranking.module, plan.kept, plan.attributes))
            yield cost_of[keep], plan
        low, high = (low, ratio) if cost_of[keep] <= goal else (ratio, high)


def _largest_counts(
    ranking: Ranking,
    selection: ChannelSelection,
    goal: float,
    estimate: CostEstimate,
    correction: float,
) -> tuple[int, ...]:
    """Return the counts with the largest cost not above a goal, or the smallest there are."""
    low, high = 0.0, MAX_RATIO
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        removed = ranking.removed(ranking.allocate(middle, selection))
        if correction + estimate.without(removed) <= goal:
            high = middle
        else:
            low = middle
    keep = ranking.allocate(high, selection)
    # Groups are rounded in steps, and often all at the same ratio. So channels that smaller ratios
    # would keep are given back, group by group, as far as they fit.
    for step in range(FILLS):
        for i, count in enumerate(ranking.allocate(low * (1 - step / FILLS), selection)):
            with_more = [*keep[:i], count, *keep[i + 1 :]]
            if count <= keep[i]:
                continue
            if correction + estimate.without(ranking.removed(with_more)) <= goal:
                keep = with_more
    return tuple(keep)
