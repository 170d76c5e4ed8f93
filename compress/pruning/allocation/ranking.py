"""Rank the channels of all groups, allocate how many stay, and plan verified slices of the rest.

Also the verified slices whose cost is nearest to a target and not above it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from math import ceil, floor, gcd, prod
from typing import TYPE_CHECKING, Literal

from compress.common.errors import PipelineInvalid, StageFailed
from compress.common.forward import copy_module
from compress.core.progress import Progress, silent
from compress.data.batch import Batch
from compress.graph.flops import count_macs
from compress.pruning.channel_settings import COMPARABLE, ChannelSelection
from compress.pruning.dependency.channel_groups import GroupSlice
from compress.pruning.importance.layer_calls import record_layer_calls
from compress.pruning.importance.remembered_scores import known_or_scored
from compress.pruning.importance.scores import ScoringSamples
from compress.pruning.verification.masked_equivalence import (
    MaskedEquivalence,
    sliced_copy,
    verify_slices,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup, SlicePlan
    from compress.pruning.dependency.rules.channel_labels import Slot
    from compress.pruning.verification.masked_equivalence import VerificationInputs

# 20 halvings separate ratios that differ by 1e-6: no group has more channels than that.
BISECTIONS = 20
ATTEMPTS = 6  # plans that are verified and measured, at most
FILLS = 8  # smaller ratios from which single groups are given back channels that still fit
MAX_RATIO = 0.99  # largest fraction of channels that is tried


@dataclass(frozen=True)
class RankedGroup:
    """A channel group with scores."""

    group: ChannelGroup
    scores: torch.Tensor
    """Importance of each channel, `(channels,)`."""
    entries: int
    """Indices that one channel takes along an axis, such as a head's width."""
    original: int
    """Channels before the first of several pruning steps."""
    structure: Hashable = None
    """Equal for groups of the same structure."""


@dataclass(frozen=True)
class Ranking:
    """A module's channel groups with a score for each channel, from which slices are planned."""

    module: nn.Module
    graph: AxisGraph
    ranked: tuple[RankedGroup, ...]
    pinned: Mapping[str, str]
    """Module → why its channels stay, known before any slice."""
    comparable: bool
    """Whether scores of different groups can be compared."""
    equivalence: MaskedEquivalence
    costs: tuple[float, ...] = ()
    """What one channel of each group costs; none where channels are to cost the same."""
    progress: Progress = silent
    """Through which the verification of slices reports how far it is."""

    def allocate(self, ratio: float, selection: ChannelSelection) -> list[int]:
        """Compute how many channels of each group stay, for a fraction of all channels to remove.

        ``uniform`` removes the same fraction of each group. ``global`` compares the channels of all
        groups, and ``isomorphic`` those of groups of the same structure (Fang et al., "Isomorphic
        Pruning for Vision Models", 2024); no group loses more than ``max_ratio``. Scores that
        cannot be compared between groups are divided by the mean of their group first, others by
        what a channel costs, if that is known.
        """
        if selection.scope == "uniform":
            return [_rounded((1 - ratio) * one.original, one, selection) for one in self.ranked]
        keep = [0] * len(self.ranked)
        members_of: dict[Hashable, list[int]] = {}
        for i, one in enumerate(self.ranked):
            structure = one.structure if selection.scope == "isomorphic" else None
            members_of.setdefault(structure, []).append(i)
        for members in members_of.values():
            # Each group keeps its minimum, and its channels among the best of all.
            counts = {
                i: min(_minimum(self.ranked[i], selection), len(self.ranked[i].scores))
                for i in members
            }
            competing: list[tuple[float, int]] = []
            for i, minimum in counts.items():
                scores = self.ranked[i].scores
                scale = 1.0 if self.comparable else float(scores.mean()) or 1.0
                if self.comparable and self.costs:
                    scale = self.costs[i] or 1.0
                best_first = scores.sort(descending=True, stable=True).values / scale
                competing += [(score, i) for score in best_first[minimum:].tolist()]
            competing.sort(key=lambda pair: -pair[0])
            total = round((1 - ratio) * sum(self.ranked[i].original for i in members))
            best = Counter(i for _, i in competing[: max(0, total - sum(counts.values()))])
            for i, minimum in counts.items():
                keep[i] = _rounded(minimum + best[i], self.ranked[i], selection)
        return keep

    def counts_for(self, widths: Mapping[str, int], share: float = 1.0) -> list[int]:
        """Return how many channels of each group stay on a share of the way to some widths.

        Raises:
            PipelineInvalid: no group has such a name, or it has fewer channels.
        """
        names = [one.group.name for one in self.ranked]
        for name, width in widths.items():
            if name not in names:
                close = difflib.get_close_matches(name, names, n=3) or names[:3]
                why = self.pinned.get(name)
                raise PipelineInvalid(
                    f"prune_channels.widths: the channels of {name!r} stay: {why}"
                    if why
                    else f"prune_channels.widths: no group of channels is named {name!r}; "
                    f"did you mean {', '.join(map(repr, close))}?"
                )
            most = self.ranked[names.index(name)].original
            if width > most:
                raise PipelineInvalid(
                    f"prune_channels.widths: {name!r} has {most} channels, found {width}"
                )
        return [
            min(len(one.scores), round(one.original - share * (one.original - width)))
            for one in self.ranked
            for width in [widths.get(one.group.name, one.original)]
        ]

    def removed(self, keep: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the least important channels of each group, all but ``keep`` of them."""
        # A stable sort, so that equal scores give the same channels everywhere.
        return [
            tuple(
                one.group.channels[i]
                for i in one.scores.argsort(stable=True)[: len(one.scores) - count].tolist()
            )
            for one, count in zip(self.ranked, keep, strict=True)
        ]

    def verify(
        self, keep: Sequence[int], on_unverified: Literal["pin", "error"] = "pin"
    ) -> SlicePlan:
        """Return the largest verified plan that keeps at least ``keep`` channels of each group.

        Raises:
            StageFailed: a group's slice is not verified and ``on_unverified`` is ``"error"``.
        """
        pinned, wanted = dict(self.pinned), []
        for one, channels in zip(self.ranked, self.removed(keep), strict=True):
            if channels:
                wanted.append(GroupSlice(one.group, channels))
            else:
                pinned[one.group.name] = f"all of its {len(one.scores)} channels are to stay"
        graph, equivalence = self.graph, self.equivalence
        plan = verify_slices(self.module, wanted, pinned, graph, equivalence, self.progress)
        verified = {one.group for one in plan.groups}
        unverified = [one.group.name for one in wanted if one.group not in verified]
        if unverified and on_unverified == "error":
            raise StageFailed(
                f"the slice of {unverified[0]!r} cannot be verified: {plan.pinned[unverified[0]]}; "
                "exclude it, or set on_unverified: pin"
            )
        return plan

    def without(self, names: set[str], reasons: Mapping[str, str]) -> Ranking:
        """Return the ranking without some groups, which are pinned instead."""
        stay = [i for i, one in enumerate(self.ranked) if one.group.name not in names]
        others = tuple(self.ranked[i] for i in stay)
        costs = tuple(self.costs[i] for i in stay) if self.costs else ()
        pinned = {**self.pinned, **{name: reasons[name] for name in names}}
        return replace(self, ranked=others, pinned=pinned, costs=costs)


def rank(
    module: nn.Module,
    inputs: VerificationInputs,
    selection: ChannelSelection | None = None,
    scoring: ScoringSamples | None = None,
    originals: Mapping[tuple[Slot, ...], int] | None = None,
    progress: Progress = silent,
) -> Ranking:
    """Trace a module's channel groups and score their channels; the module is not changed.

    Only channels of modules that ``selection.include`` matches, or none that those of ``exclude``
    output, normalise or scale, are removed. ``originals`` gives a group's channels before the first
    of several pruning steps, by its slots. See :func:`score_groups` for ``scoring``; in a block of
    :func:`remembering_scores` nothing is scored twice.

    Raises:
        PipelineInvalid: a pattern matches no module.
        StageFailed: the module cannot be traced, or does not take the samples.
    """
    selection, scoring = selection or ChannelSelection(), scoring or ScoringSamples()
    included = modules_matching(module, selection.include, "prune_channels.include")
    excluded = modules_matching(module, selection.exclude)
    graph = inputs.trace(module)
    pinned, selected = dict(graph.pinned), []
    for group in graph.groups:
        excluded_by = [excluded[name] for name in group.owners if name in excluded]
        if excluded_by:
            pinned[group.name] = f"excluded by {excluded_by[0]!r}"
        elif selection.include and not any(name in included for name in group.producer_modules):
            pinned[group.name] = "not among those that `include` names"
        else:
            selected.append(group)
    scores = known_or_scored(module, selected, graph, selection.importance, scoring, progress)
    ranked = []
    modules = dict(module.named_modules())
    for group, found in zip(selected, scores, strict=True):
        if isinstance(found, str):
            pinned[group.name] = found
        else:
            original = (originals or {}).get(group.slots, len(found))
            # Groups have the same structure if they lie along the same axes of the same kinds of
            # layers, whatever their widths.
            parts = set()
            for (tensor, axis), count in zip(group.slots, group.entries, strict=True):
                owner, _, short = tensor.rpartition(".")
                parts.add((type(modules[owner]).__name__, short, axis, count))
            structure = tuple(sorted(parts))
            ranked.append(RankedGroup(group, found, min(group.entries), original, structure))
    comparable, equivalence = selection.importance in COMPARABLE, MaskedEquivalence(module, inputs)
    groups = tuple(ranked)
    return Ranking(module, graph, groups, pinned, comparable, equivalence, progress=progress)


def modules_matching(
    module: nn.Module, patterns: Sequence[str], setting: str = "prune_channels.exclude"
) -> dict[str, str]:
    """Return the modules that patterns match, with all modules inside them → the pattern."""
    names = [name for name, _ in module.named_modules() if name]
    return names_matching(names, patterns, setting, "module")


def names_matching(
    names: Sequence[str], patterns: Sequence[str], setting: str, kind: str
) -> dict[str, str]:
    """Return the dotted names that patterns match, with all names below them → the pattern.

    Raises:
        PipelineInvalid: a pattern matches none; the message names close matches.
    """
    pattern_of: dict[str, str] = {}
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            close = difflib.get_close_matches(pattern, names, n=3) or names[:3]
            raise PipelineInvalid(
                f"{setting}: no {kind} matches {pattern!r}; "
                f"did you mean {', '.join(map(repr, close))}?"
            )
        for name in names:
            if any(name == m or name.startswith(f"{m}.") for m in matched):
                pattern_of.setdefault(name, pattern)
    return pattern_of


def _rounded(wanted: float, one: RankedGroup, selection: ChannelSelection) -> int:
    """Return the nearest allowed number of channels, a multiple of a unit.

    A group that is narrower than two multiples of ``round_to`` is rounded to a half, a quarter … of
    it, so that it can still be pruned.
    """
    # Runtimes compute in blocks of channels: ONNX Runtime's convolutions on CPU in 16. An axis on
    # which each channel takes several indices, like a head's width, is a multiple sooner.
    unit = selection.round_to // gcd(selection.round_to, one.entries)
    while unit > 1 and one.original < 2 * unit:
        unit //= 2
    # Not round(), which rounds a half to the even multiple.
    nearest = floor(wanted / unit + 0.5) * unit
    minimum = ceil(_minimum(one, selection) / unit) * unit
    return min(len(one.scores), max(unit, minimum, nearest))


def _minimum(one: RankedGroup, selection: ChannelSelection) -> int:
    # 1e-9: (1 - 0.7) * 10 is 3.0000000000000004, of which 3 channels are meant and not 4.
    capped = (
        1 if selection.scope == "uniform" else ceil((1 - selection.max_ratio) * one.original - 1e-9)
    )
    return max(capped, selection.min_channels)


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
        count = call.positions / len(inputs[0])
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
    estimate: CostEstimate | None = None,
) -> SlicePlan:
    """Return the verified plan whose measured cost is nearest to ``goal`` and not above it.

    Counts of channels are searched by an ``estimate`` of the cost; without one, as for latency,
    among a few ratios.

    Raises:
        StageFailed: no plan reaches the goal, or a group cannot be verified and
            ``selection.on_unverified`` is ``"error"``.
    """
    if estimate is not None:
        whole = estimate.without([])
        first = (one.group.channels[:1] for one in ranking.ranked)
        costs = tuple(whole - estimate.without([channel]) for channel in first)
        ranking = replace(ranking, costs=costs)
    search = _TargetSearch(ranking, selection, goal, measure)
    plan_of_cost = dict(search.by_bisection() if estimate is None else search.by_estimate(estimate))
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


@dataclass
class _TargetSearch:
    """Yields plans with their measured costs, some of them not above a goal."""

    ranking: Ranking
    selection: ChannelSelection
    goal: float
    measure: Callable[[nn.Module], float]

    def by_estimate(self, estimate: CostEstimate) -> Iterator[tuple[float, SlicePlan]]:
        """Yield plans of the largest counts whose estimated cost is not above the goal."""
        errors: dict[tuple[int, ...], float] = {}  # channels kept → measured cost minus estimate
        for _ in range(ATTEMPTS):
            # The estimate is corrected by its last error; if that leads to counts that were tried,
            # by its largest.
            known = list(errors.values())
            candidates = (
                self._largest_counts(estimate, correction)
                for correction in ((known[-1], max(known)) if known else (0.0,))
            )
            keep = next((counts for counts in candidates if counts not in errors), None)
            if keep is None:
                return
            plan = self.ranking.verify(keep, self.selection.on_unverified)
            verified = {one.group for one in plan.groups}
            unverified = {
                one.group.name
                for one, count in zip(self.ranking.ranked, keep, strict=True)
                if count < len(one.scores) and one.group not in verified
            }
            if unverified:
                # Counts are by group, so the errors of those tried so far are of no use.
                self.ranking, errors = self.ranking.without(unverified, plan.pinned), {}
                continue
            cost = self.measure(sliced_copy(self.ranking.module, plan))
            errors[keep] = cost - estimate.without(self.ranking.removed(keep))
            yield cost, plan

    def by_bisection(self) -> Iterator[tuple[float, SlicePlan]]:
        """Yield plans of ratios from the goal's to the largest."""
        # Whole models are measured, because the sum of its layers' times is a poor estimate of a
        # model's latency. Rounding often leads to the same counts again.
        cost_of: dict[tuple[int, ...], float] = {}
        low, high = 0.0, MAX_RATIO
        for attempt in range(ATTEMPTS):
            # Start near the goal; if that is too slow, bisect up to the largest ratio.
            ratio = min(1 - self.goal, MAX_RATIO) if attempt == 0 else (low + high) / 2
            keep = tuple(self.ranking.allocate(ratio, self.selection))
            if keep not in cost_of:
                plan = self.ranking.verify(keep, self.selection.on_unverified)
                sliced = sliced_copy(self.ranking.module, plan)
                cost_of[keep] = self.measure(sliced)
                yield cost_of[keep], plan
            low, high = (low, ratio) if cost_of[keep] <= self.goal else (ratio, high)

    def _largest_counts(self, estimate: CostEstimate, correction: float) -> tuple[int, ...]:
        """Return the counts with the largest cost not above the goal, or the smallest there are."""

        def fits(keep: Sequence[int]) -> bool:
            return correction + estimate.without(self.ranking.removed(keep)) <= self.goal

        def allocated(ratio: float) -> list[int]:
            return self.ranking.allocate(ratio, self.selection)

        low, high = 0.0, MAX_RATIO
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(allocated(middle)) else (middle, high)
        keep = allocated(high)
        # Groups are rounded in steps, and often all at the same ratio. So channels that smaller
        # ratios would keep are given back, group by group, as far as they fit.
        for step in range(FILLS):
            for i, count in enumerate(allocated(low * (1 - step / FILLS))):
                with_more = [*keep[:i], count, *keep[i + 1 :]]
                if count > keep[i] and fits(with_more):
                    keep = with_more
        return tuple(keep)
