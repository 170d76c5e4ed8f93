"""From equal labels to families of channels, and from removed channels to the indices that stay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from compress.pruning.dependency.rules.channel_labels import LabelBook, Slot

Kept = dict[str, dict[int, tuple[int, ...]]]
"""Tensor name → axis → indices that stay, ascending."""


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that are alike: each of them has entries in the same tensors along the same axes."""

    slots: tuple[Slot, ...]
    channels: tuple[int, ...]
    """Class of each channel, in the order in which the first tensor holds them."""
    made_by: tuple[Slot, ...]
    """Those of the slots along which a layer makes the channels."""
    read_by: tuple[Slot, ...]
    """Those along which the next layers read them."""

    @property
    def producers(self) -> tuple[str, ...]:
        """Modules that make the channels; the outermost one's name is empty."""
        return _owners(self.made_by)

    @property
    def owners(self) -> tuple[str, ...]:
        """Modules whose own channels these are: they make, normalise, scale or shift them."""
        return _owners(slot for slot in self.slots if slot not in self.read_by)

    @property
    def producers_slots(self) -> tuple[str, ...]:
        """What makes the channels, by name: modules, or the outermost module's own weights."""
        return tuple(dict.fromkeys(_name(slot) for slot in self.made_by))

    @property
    def name(self) -> str:
        """The first maker of the channels, or the first tensor that holds them."""
        return next(iter(self.producers_slots), self.slots[0][0])


@dataclass(frozen=True)
class AxisGraph:
    """What can be cut out of a module, and what cannot and why."""

    groups: tuple[ChannelGroup, ...]
    classes: Mapping[Slot, torch.Tensor]
    """Tensor and axis → the class of each index."""
    pinned: Mapping[str, str]
    """Module → why some or all of its channels stay."""
    names: Mapping[str, tuple[str, ...]]
    """Tensor → all names it is held under, its own first."""
    passed: Mapping[str, torch.Tensor]
    """Layer without weights whose attributes count its channels → the class of each."""

    @property
    def class_count(self) -> int:
        """How many classes there are, pinned ones included."""
        return 1 + max((int(column.max()) for column in self.classes.values()), default=-1)

    def entries(self, slot: Slot, *channels: int) -> int:
        """Return how many indices of an axis channels take."""
        return int(torch.isin(self.classes[slot], torch.tensor(channels)).sum())

    def kept(self, removed: Iterable[int]) -> Kept:
        """Return the indices that stay, for every tensor that loses some."""
        leaving = torch.tensor(sorted(removed), dtype=torch.int64)
        kept: Kept = {}
        for (tensor, axis), classes in self.classes.items():
            leaves = torch.isin(classes, leaving)
            if leaves.any():
                stays = tuple((~leaves).nonzero().flatten().tolist())
                for name in self.names[tensor]:
                    kept.setdefault(name, {})[axis] = stays
        return kept


def solve(book: LabelBook, names: Mapping[str, tuple[str, ...]]) -> AxisGraph:
    """Return the axis graph that a book of labels describes.

    Args:
        book: the labels, after the whole graph was walked; some more may be pinned here.
        names: tensor → all names it is held under.
    """
    _join_parts(book)
    book.settle()
    labels_to_class, reasons = book.solve()
    classes: dict[Slot, torch.Tensor] = {}
    for (name, axes), labels in book.parts.items():
        found = _axes_of(labels_to_class[labels])
        classes |= {(name, axes[i]): column for i, column in found.items()}
        held = {c for column in found.values() for c in column.tolist()}
        for stray in set(labels_to_class[labels].flatten().tolist()) - held:
            reasons.setdefault(stray, f"{name} holds it along no single axis")
    for stray in _only_read(classes, book):
        reasons.setdefault(stray, "it reads constants or integers")
    families = _families(classes, set(reasons), book)
    pinned = _pinned(classes, reasons, book.produced, families)
    passed = {name: labels_to_class[labels] for name, labels in book.passed.items()}
    return AxisGraph(families, classes, {**book.left_alone, **pinned}, names, passed)


def _join_parts(book: LabelBook) -> None:
    """Make labels of one axis equal where a tensor is told apart in several ways."""
    parts_of: dict[str, list[tuple[int, ...]]] = {}
    for name, axes in book.parts:
        for others in parts_of.setdefault(name, []):
            every = sorted({*axes, *others})
            if len(every) < len(axes) + len(others):
                both = (
                    book.parts[name, part].view(
                        [
                            book.parts[name, part].shape[part.index(a)] if a in part else 1
                            for a in every
                        ]
                    )
                    for part in (axes, others)
                )
                book.equate(*both)
        parts_of[name].append(axes)


def _only_read(classes: Mapping[Slot, torch.Tensor], book: LabelBook) -> set[int]:
    """Return the classes that layers read and no tensor of the module makes or holds."""
    read: set[int] = set()
    held: set[int] = set()
    for slot, column in classes.items():
        only_read = slot in book.consumed and slot not in book.produced
        (read if only_read else held).update(column.tolist())
    return read - held


def _axes_of(classes: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return the axes along which a tensor's classes change and every slice is of one class."""
    if classes.dim() == 1:
        return {0: classes}
    found = {}
    for axis in range(classes.dim()):
        slices = classes.movedim(axis, 0).reshape(classes.size(axis), -1)
        if (slices == slices[:, :1]).all() and (slices[:, 0] != slices[0, 0]).any():
            found[axis] = slices[:, 0].contiguous()
    return found


def _families(
    classes: Mapping[Slot, torch.Tensor], pinned: set[int], book: LabelBook
) -> tuple[ChannelGroup, ...]:
    slots_of: dict[int, list[Slot]] = {}
    for slot, column in classes.items():
        for channel in dict.fromkeys(column.tolist()):
            slots_of.setdefault(channel, []).append(slot)
    only_read = book.consumed - book.produced
    alike: dict[tuple[Slot, ...], list[int]] = {}
    for channel, slots in slots_of.items():
        if channel not in pinned:
            alike.setdefault(tuple(slots), []).append(channel)
    return tuple(
        ChannelGroup(
            slots,
            tuple(channels),
            made_by=tuple(slot for slot in slots if slot in book.produced),
            read_by=tuple(slot for slot in slots if slot in only_read),
        )
        for slots, channels in alike.items()
        # What no layer makes are entries that this run left aside, like positions past its length.
        if len(channels) > 1 and not book.produced.isdisjoint(slots)
    )


def _pinned(
    classes: Mapping[Slot, torch.Tensor],
    reasons: Mapping[int, str],
    produced: set[Slot],
    families: tuple[ChannelGroup, ...],
) -> dict[str, str]:
    """Return, for each module with channels that are in no family, why."""
    free = {channel for family in families for channel in family.channels}
    pinned: dict[str, str] = {}
    for slot, column in classes.items():
        if slot in produced:
            for channel in dict.fromkeys(column.tolist()):
                if channel not in free:
                    reason = reasons.get(channel, "its channels can only leave all together")
                    pinned.setdefault(_name(slot), reason)
    return pinned


def _owners(slots: Iterable[Slot]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name, _ in slots))


def _name(slot: Slot) -> str:
    """Return the module that holds a tensor, or the tensor where that is the outermost module."""
    return slot[0].rpartition(".")[0] or slot[0]
