"""How many channels of each family stay, given how much each channel matters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, floor, gcd
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

    from compress.pruning.dependency.channel_groups import ChannelGroup

Scope: TypeAlias = Literal["uniform", "global", "isomorphic"]


@dataclass(frozen=True)
class Ranked:
    """A family whose channels have scores."""

    family: ChannelGroup
    scores: torch.Tensor
    """How much each channel matters."""
    entries: int
    """Places that one channel takes along an axis, like a head's width."""
    original: int
    """Channels before the first of several cuts."""
    kind: Hashable = None
    """What families that are alike in structure have in common."""


@dataclass(frozen=True)
class Limits:
    """What a plan of how many channels stay must observe."""

    scope: Scope = "uniform"
    round_to: int = 16
    min_channels: int = 1
    max_ratio: float = 0.8
    """Largest part of a family that leaves when families are compared with one another."""


def allocate(
    ranked: Sequence[Ranked], ratio: float, limits: Limits, *, comparable: bool = False
) -> list[int]:
    """Return how many channels of each family stay.

    ``uniform`` removes the same fraction of each family. ``global`` compares the channels of all
    families, and ``isomorphic`` those of families of the same structure (Fang et al., "Isomorphic
    Pruning for Vision Models", 2024); none loses more than ``max_ratio``.

    Args:
        ranked: the families.
        ratio: fraction of all channels to remove.
        limits: what must be observed.
        comparable: whether scores of several families mean the same; where not they are compared
            relative to the mean of their family.
    """
    if limits.scope == "uniform":
        return [_rounded((1 - ratio) * one.original, one, limits) for one in ranked]
    wanted = [0] * len(ranked)
    kinds = [one.kind if limits.scope == "isomorphic" else None for one in ranked]
    for kind in dict.fromkeys(kinds):
        members = [i for i, own in enumerate(kinds) if own == kind]
        counts = _compared([ranked[i] for i in members], ratio, limits, comparable)
        for i, count in zip(members, counts, strict=True):
            wanted[i] = _rounded(count, ranked[i], limits)
    return wanted


def unit_of(count: int, entries: int, round_to: int) -> int:
    """Return the number of channels of which a family keeps a multiple.

    Runtimes compute in blocks of channels: ONNX Runtime's convolutions on CPU in 16. A family that
    is narrower than two multiples is rounded to a half, a quarter … of it, so that it is still cut.

    Args:
        count: channels in the family.
        entries: places that one channel takes along an axis, like a head's width.
        round_to: multiple that the axis should have.
    """
    unit = round_to // gcd(round_to, entries)
    while unit > 1 and count < 2 * unit:
        unit //= 2
    return unit


def _rounded(wanted: float, one: Ranked, limits: Limits) -> int:
    """Return the nearest count that is allowed."""
    unit = unit_of(one.original, one.entries, limits.round_to)
    nearest = floor(wanted / unit + 0.5) * unit
    least = ceil(_least(one, limits) / unit) * unit
    return min(len(one.scores), max(unit, least, nearest))


def _least(one: Ranked, limits: Limits) -> int:
    capped = 1 if limits.scope == "uniform" else ceil((1 - limits.max_ratio) * one.original - 1e-9)
    return max(capped, limits.min_channels)


def _compared(
    ranked: Sequence[Ranked], ratio: float, limits: Limits, comparable: bool
) -> list[int]:
    """Return how many channels of each family are among the best of all, or must stay."""
    total = round((1 - ratio) * sum(one.original for one in ranked))
    counts = [min(_least(one, limits), len(one.scores)) for one in ranked]
    others: list[tuple[float, int]] = []
    for i, (one, least) in enumerate(zip(ranked, counts, strict=True)):
        scale = 1.0 if comparable else float(one.scores.mean()) or 1.0
        best_first = one.scores.sort(descending=True, stable=True).values / scale
        others += [(score, i) for score in best_first[least:].tolist()]
    others.sort(key=lambda pair: -pair[0])
    best = Counter(i for _, i in others[: max(0, total - sum(counts))])
    return [count + best[i] for i, count in enumerate(counts)]
