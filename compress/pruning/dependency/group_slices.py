"""Cuts: the channels that leave one family, and those of a whole module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compress.pruning.dependency.channel_groups import AxisGraph, ChannelGroup, Kept

Value = int | list[int]
"""What an attribute holds: a number of channels or of blocks of them, or the sizes of parts."""


@dataclass(frozen=True, eq=False)
class Change:
    """An attribute that counts channels, and so changes with what leaves."""

    attribute: str
    """Dotted name in the module."""
    counted: torch.Tensor
    """Classes of the channels that it counts."""
    unit: int | tuple[int, ...] = 1
    """Channels counted as one, or the sizes of the parts into which they are split."""

    def value(self, removed: torch.Tensor) -> Value:
        """Return the attribute's value once some classes have left."""
        stays = ~torch.isin(self.counted, removed)
        if isinstance(self.unit, int):
            return int(stays.sum()) // self.unit
        return [int(part.sum()) for part in torch.split(stays, list(self.unit))]


@dataclass(frozen=True)
class GroupSlice:
    """The channels that leave one family."""

    group: ChannelGroup
    removed: tuple[int, ...]
    changes: tuple[Change, ...] = field(default=(), compare=False)
    """Attributes that go with the cut."""

    @property
    def before(self) -> int:
        """Channels before the cut."""
        return len(self.group.channels)

    @property
    def after(self) -> int:
        """Channels after the cut."""
        return self.before - len(self.removed)


@dataclass(frozen=True)
class SlicePlan:
    """A proven cut of a whole module, and what was left alone and why."""

    kept: Kept
    attributes: dict[str, Value]
    groups: tuple[GroupSlice, ...]
    pinned: dict[str, str]
    """Module whose channels stay → why."""


def joined(cuts: Sequence[GroupSlice], pinned: dict[str, str], graph: AxisGraph) -> SlicePlan:
    """Return the cut of a whole module that cuts of some of its families make together."""
    removed = [channel for cut in cuts for channel in cut.removed]
    leaving = torch.tensor(sorted(removed), dtype=torch.int64)
    changes = [change for cut in cuts for change in cut.changes]
    attributes = {change.attribute: change.value(leaving) for change in changes}
    return SlicePlan(graph.kept(removed), attributes, tuple(cuts), pinned)
