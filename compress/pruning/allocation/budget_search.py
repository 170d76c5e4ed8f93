"""Finding the proven cut whose cost is nearest to a goal and not above it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from compress.pruning.allocation.ranking import OnUnverified, Ranking
    from compress.pruning.allocation.ratios import Limits
    from compress.pruning.dependency.group_slices import SlicePlan

BISECTIONS = 20
ATTEMPTS = 6
"""Cuts that are proven and measured, at most."""
FILLS = 8
"""Smaller ratios from which families are given back what still fits."""
MOST = 0.99
"""Largest fraction of channels that is tried."""


def cut_to_cost(
    ranking: Ranking,
    limits: Limits,
    goal: float,
    estimate: Callable[[Sequence[tuple[int, ...]]], float],
    measure: Callable[[SlicePlan], float],
    on_unverified: OnUnverified = "pin",
) -> SlicePlan:
    """Return a proven cut that costs at most ``goal``, and as near to it as rounding allows.

    An estimate steers the search and is corrected by what the cuts it leads to really cost.

    Args:
        ranking: the families.
        limits: what must be observed.
        goal: the cost not to be exceeded.
        estimate: the channels removed from each family → about what is left of the cost.
        measure: a proven cut → its cost.
        on_unverified: whether a family that cannot be proven is an error.

    Raises:
        StageFailed: the largest cut still costs more.
    """
    found: dict[float, SlicePlan] = {}
    off: dict[tuple[int, ...], float] = {}
    for _ in range(ATTEMPTS):
        keep = _next(ranking, limits, goal, estimate, list(off.values()), set(off))
        if keep is None:
            break
        cut = ranking.prove(keep, on_unverified)
        refused = _refused(ranking, keep, cut)
        if refused:
            ranking, off = ranking.without(refused, cut.pinned), {}
            continue
        cost = measure(cut)
        found[cost] = cut
        off[keep] = cost - estimate(ranking.removed(keep))
    return _nearest(found, goal)


def cut_to_latency(
    ranking: Ranking,
    limits: Limits,
    goal: float,
    measure: Callable[[SlicePlan], float],
    on_unverified: OnUnverified = "pin",
) -> SlicePlan:
    """Return a proven cut that was measured to take at most ``goal``, among a few candidates.

    Whole models are measured: the sum of its layers' times tells little of a model's.

    Args:
        ranking: the families.
        limits: what must be observed.
        goal: the share of the uncut model's latency.
        measure: a proven cut → its latency over the uncut model's.
        on_unverified: whether a family that cannot be proven is an error.

    Raises:
        StageFailed: none of the candidates is fast enough.
    """
    measured: dict[tuple[int, ...], float] = {}
    found: dict[float, SlicePlan] = {}
    low, high = 0.0, MOST
    for attempt in range(ATTEMPTS):
        # A ratio near the goal comes first; where that is too slow, the largest one may be, too.
        ratio = min(1 - goal, MOST) if attempt == 0 else (low + high) / 2
        keep = tuple(ranking.allocate(ratio, limits))
        if keep not in measured:
            cut = ranking.prove(keep, on_unverified)
            measured[keep] = measure(cut)
            found[measured[keep]] = cut
        low, high = (low, ratio) if measured[keep] <= goal else (ratio, high)
    return _nearest(found, goal)


def _next(
    ranking: Ranking,
    limits: Limits,
    goal: float,
    estimate: Callable[[Sequence[tuple[int, ...]]], float],
    off: Sequence[float],
    tried: Collection[tuple[int, ...]],
) -> tuple[int, ...] | None:
    """Return the largest counts that should reach a goal and were not tried, or None.

    What the estimate was last found to be off by is added to it; where that leads back to counts
    that were tried, the worst that was found.
    """
    for correction in (off[-1], max(off)) if off else (0.0,):
        keep = _largest(
            ranking,
            limits,
            lambda kept: correction + estimate(ranking.removed(kept)),  # noqa: B023 - used at once
            goal,
        )
        if tuple(keep) not in tried:
            return tuple(keep)
    return None


def _largest(
    ranking: Ranking, limits: Limits, expected: Callable[[Sequence[int]], float], goal: float
) -> list[int]:
    """Return the counts with the largest cost not above a goal, or the smallest there are.

    Families are rounded in steps, and often all at the same ratio; so channels that smaller ratios
    would keep are given back, family by family, where they still fit.
    """
    low, high = 0.0, MOST
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if expected(ranking.allocate(middle, limits)) <= goal:
            high = middle
        else:
            low = middle
    keep = ranking.allocate(high, limits)
    for step in range(FILLS):
        for i, count in enumerate(ranking.allocate(low * (1 - step / FILLS), limits)):
            with_more = [*keep[:i], count, *keep[i + 1 :]]
            if count > keep[i] and expected(with_more) <= goal:
                keep = with_more
    return keep


def _refused(ranking: Ranking, keep: Sequence[int], cut: SlicePlan) -> set[str]:
    """Return the names of the families that were to lose channels and could not be proven."""
    proven = {one.group.name for one in cut.groups}
    wanted = {
        one.family.name
        for one, count in zip(ranking.ranked, keep, strict=True)
        if count < len(one.scores)
    }
    return wanted - proven


def _nearest(found: dict[float, SlicePlan], goal: float) -> SlicePlan:
    reached = [cost for cost in found if cost <= goal]
    if not reached:
        least = f"the smallest that was found is {min(found):.4g}" if found else "no cut is proven"
        raise StageFailed(
            f"the target of {goal:.4g} cannot be reached: {least}; ask for more to remain, or "
            "lower round_to, min_channels or what is excluded"
        )
    return found[max(reached)]
