"""Allocate how many channels of each group stay, given a score for each channel."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, floor, gcd
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

    from compress.pruning.channel_settings import ChannelSelection
    from compress.pruning.dependency.channel_groups import ChannelGroup


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


def allocate(
    ranked: Sequence[RankedGroup],
    ratio: float,
    selection: ChannelSelection,
    *,
    comparable: bool = False,
) -> list[int]:
    """Compute how many channels of each group stay, for a fraction of all channels to remove.

    ``uniform`` removes the same fraction of each group. ``global`` compares the channels of all
    groups, and ``isomorphic`` those of groups of the same structure (Fang et al., "Isomorphic
    Pruning for Vision Models", 2024); no group loses more than ``max_ratio``. Scores that are not
    ``comparable`` between groups are divided by the mean of their group first.
    """
    if selection.scope == "uniform":
        return [_rounded((1 - ratio) * one.original, one, selection) for one in ranked]
    keep = [0] * len(ranked)
    structures = [one.structure if selection.scope == "isomorphic" else None for one in ranked]
    for structure in dict.fromkeys(structures):
        members = [i for i, own in enumerate(structures) if own == structure]
        counts = _counts_among_best([ranked[i] for i in members], ratio, selection, comparable)
        for i, count in zip(members, counts, strict=True):
            keep[i] = _rounded(count, ranked[i], selection)
    return keep


def _counts_among_best(
    ranked: Sequence[RankedGroup], ratio: float, selection: ChannelSelection, comparable: bool
) -> list[int]:
    """Count for each group its channels among the best of all groups, at least its minimum."""
    total = round((1 - ratio) * sum(one.original for one in ranked))
    counts = [min(_minimum(one, selection), len(one.scores)) for one in ranked]
    competing: list[tuple[float, int]] = []
    for i, (one, minimum) in enumerate(zip(ranked, counts, strict=True)):
        scale = 1.0 if comparable else float(one.scores.mean()) or 1.0
        best_first = one.scores.sort(descending=True, stable=True).values / scale
        competing += [(score, i) for score in best_first[minimum:].tolist()]
    competing.sort(key=lambda pair: -pair[0])
    best = Counter(i for _, i in competing[: max(0, total - sum(counts))])
    return [count + best[i] for i, count in enumerate(counts)]


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
