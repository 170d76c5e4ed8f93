"""Channel groups, slices of them, and how they follow from the labels of a traced graph.

Entries of weights with equal labels belong to one *channel class*: they can only be removed
together. Channels whose entries lie in the same tensors along the same axes form a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from compress.pruning.dependency.rules.channel_labels import WILD

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from compress.pruning.dependency.rules.channel_labels import LabelBook, SizeLabels, Slot
    from compress.pruning.dependency.sized_calls import SizedCall

Kept = dict[str, dict[int, tuple[int, ...]]]
"""Tensor name → axis → indices that stay, ascending."""
Value = int | list[int]
"""Value of an attribute: a number of channels or of blocks of channels, or the sizes of parts."""


@dataclass(frozen=True)
class ChannelGroup:
    """Interchangeable channels: each has entries in the same tensors along the same axes."""

    slots: tuple[Slot, ...]
    """The tensors and axes that hold the channels."""
    channels: tuple[int, ...]
    """Class of each channel, in the order of the first slot's indices."""
    produced_slots: tuple[Slot, ...]
    """The slots along which a layer outputs the channels, such as a convolution's axis 0."""
    consumed_slots: tuple[Slot, ...]
    """The slots along which the next layers only read the channels."""

    producers: tuple[str, ...]
    """What outputs the channels: names of modules, or of the outermost module's own weights."""
    entries: tuple[int, ...]
    """Indices that one channel takes in each slot, such as a head's width."""

    @property
    def producer_modules(self) -> tuple[str, ...]:
        """Modules that output the channels; the outermost one's name is empty."""
        return _modules(self.produced_slots)

    @property
    def owners(self) -> tuple[str, ...]:
        """Modules that output, normalise, scale or shift the channels, not those that read them."""
        return _modules(slot for slot in self.slots if slot not in self.consumed_slots)

    @property
    def name(self) -> str:
        """The first producer of the channels, or the first tensor that holds them."""
        return next(iter(self.producers), self.slots[0][0])


@dataclass(frozen=True)
class AxisGraph:
    """Which channels of a module can be removed together, and which not at all and why."""

    groups: tuple[ChannelGroup, ...]
    classes: Mapping[Slot, torch.Tensor]
    """Tensor and axis → the class of each index, `(axis size,)`."""
    pinned: Mapping[str, str]
    """Module → why some or all of its channels cannot be removed."""
    names: Mapping[str, tuple[str, ...]]
    """Tensor → all names it is registered under (tied weights have several), its own first."""
    counted: Mapping[str, torch.Tensor]
    """Layer whose attributes count the channels of its input → the class of each channel."""
    statistics: Mapping[str, tuple[int, torch.Tensor]]
    """Node that takes statistics over channels → the axis of its input, and each index's class."""
    sized: tuple[SizedAxis, ...]
    """Sizes of axes with channels that the module's code writes in calls."""
    class_count: int
    """Number of classes, pinned ones included."""

    def entries(self, slot: Slot, *channels: int) -> int:
        """Count the indices of an axis that belong to some channels."""
        return int(torch.isin(self.classes[slot], torch.tensor(channels)).sum())

    def kept(self, removed: Iterable[int]) -> Kept:
        """Compute the indices that stay when classes are removed, for every tensor that shrinks."""
        removed_classes = torch.tensor(sorted(removed), dtype=torch.int64)
        kept: Kept = {}
        for (tensor, axis), classes in self.classes.items():
            is_removed = torch.isin(classes, removed_classes)
            if is_removed.any():
                stays = tuple((~is_removed).nonzero().flatten().tolist())
                for name in self.names[tensor]:
                    kept.setdefault(name, {})[axis] = stays
        return kept


@dataclass(frozen=True, eq=False)
class SizedAxis:
    """A size that the module's code writes in a call, and the channels of that axis."""

    call: SizedCall
    index: int
    """Index of the size among those of the call."""
    value: int | tuple[int, ...]
    """The size, or those of the parts of the axis."""
    counted: torch.Tensor | None
    """Class of each index of the axis; None where the axis lies within channels or across."""

    def change(self) -> Change | None:
        """Return how the size changes with a slice, if it is an attribute made for it."""
        attribute = self.call.attribute(self.index)
        if self.counted is None or attribute not in getattr(self.call.kind, "named_sizes", ()):
            return None
        unit = 1 if isinstance(self.value, int) else self.value
        return Change(f"{self.call.module}.{attribute}".lstrip("."), self.counted, unit)


# eq=False, because tensors compare element by element.
@dataclass(frozen=True, eq=False)
class Change:
    """An attribute that counts channels, such as a number of heads, and so changes with a slice."""

    attribute: str
    """Dotted name in the module."""
    counted: torch.Tensor
    """Classes of the channels that it counts."""
    unit: int | tuple[int, ...] = 1
    """Channels counted as one, or the sizes of the parts into which they are split."""

    def value(self, removed: torch.Tensor) -> Value:
        """Compute the attribute's value after some classes were removed."""
        stays = ~torch.isin(self.counted, removed)
        if isinstance(self.unit, int):
            return int(stays.sum()) // self.unit
        return [int(part.sum()) for part in torch.split(stays, list(self.unit))]


@dataclass(frozen=True)
class GroupSlice:
    """The channels to remove from one group."""

    group: ChannelGroup
    removed: tuple[int, ...]
    """Classes of the channels to remove."""
    changes: tuple[Change, ...] = field(default=(), compare=False)
    """Attributes that change with it."""

    @property
    def before(self) -> int:
        """Channels of the group before slicing."""
        return len(self.group.channels)

    @property
    def after(self) -> int:
        """Channels of the group after slicing."""
        return self.before - len(self.removed)


@dataclass(frozen=True)
class SlicePlan:
    """Slices of several groups of a module together, and why other channels stay."""

    kept: Kept
    attributes: dict[str, Value]
    """Dotted attribute → value after slicing."""
    groups: tuple[GroupSlice, ...]
    pinned: dict[str, str]
    """Module whose channels stay → why."""

    @classmethod
    def combine(
        cls, slices: Sequence[GroupSlice], pinned: dict[str, str], graph: AxisGraph
    ) -> SlicePlan:
        """Combine slices of several groups into one plan for the whole module."""
        removed = [channel for one in slices for channel in one.removed]
        removed_classes = torch.tensor(sorted(removed), dtype=torch.int64)
        attributes = {
            change.attribute: change.value(removed_classes)
            for one in slices
            for change in one.changes
        }
        return cls(graph.kept(removed), attributes, tuple(slices), pinned)


def build_axis_graph(
    book: LabelBook,
    labels_to_class: torch.Tensor,
    reasons: Mapping[int, str],
    names: Mapping[str, tuple[str, ...]],
    calls: Sequence[SizedCall] = (),
) -> AxisGraph:
    """Derive channel groups from the labels that the operators' rules assigned and equated.

    ``reasons`` gives why classes are pinned; some more are found here.
    """
    reasons = dict(reasons)
    classes: dict[Slot, torch.Tensor] = {}
    for (tensor, axes), labels in book.parts.items():
        part_classes = labels_to_class[labels]
        columns = _classes_along_axes(part_classes)
        classes |= {(tensor, axes[i]): column for i, column in columns.items()}
        along_an_axis = {c for column in columns.values() for c in column.tolist()}
        for stray in set(part_classes.flatten().tolist()) - along_an_axis:
            reasons.setdefault(stray, f"{tensor} holds it along no single axis")
    # Classes that layers only read, and no tensor of the module produces or holds.
    only_read = book.consumed - book.produced
    read: set[int] = set()
    held: set[int] = set()
    for slot, column in classes.items():
        (read if slot in only_read else held).update(column.tolist())
    for stray in read - held:
        reasons.setdefault(stray, "it reads constants or integers")
    groups = _group_channels(classes, set(reasons), book)
    free = {channel for group in groups for channel in group.channels}
    pinned: dict[str, str] = {}
    for slot, column in classes.items():
        if slot in book.produced:
            for channel in dict.fromkeys(column.tolist()):
                if channel not in free:
                    reason = reasons.get(channel, "its channels can only leave all together")
                    pinned.setdefault(_owner_name(slot), reason)
    return AxisGraph(
        groups=groups,
        classes=classes,
        pinned={**book.opaque_layers, **pinned},
        names=names,
        counted={name: labels_to_class[labels] for name, labels in book.counted.items()},
        statistics={
            node: (axis, labels_to_class[labels])
            for node, (axis, labels) in book.statistics.items()
        },
        sized=tuple(_sized_axes(book, labels_to_class, calls)),
        class_count=1 + max((int(column.max()) for column in classes.values()), default=-1),
    )


def _sized_axes(
    book: LabelBook, labels_to_class: torch.Tensor, calls: Sequence[SizedCall]
) -> Iterator[SizedAxis]:
    """Yield the sizes that calls write, once each, though a call may run several times."""
    with_wild = torch.cat([labels_to_class, torch.tensor([WILD])])
    written: dict[tuple[int, int], list[SizeLabels]] = {}
    for size in book.sizes:
        written.setdefault((size.call, size.index), []).append(size)
    for (call, index), sizes in written.items():
        first, *others = sizes
        classes = with_wild[first.labels]
        is_whole = bool((classes == classes[:, :1]).all())
        if all(other.value == first.value for other in others):
            counted = classes[:, 0].contiguous() if is_whole else None
            yield SizedAxis(calls[call], index, first.value, counted)


def _classes_along_axes(classes: torch.Tensor) -> dict[int, torch.Tensor]:
    """Find the axes along which a tensor's classes change while every slice is of one class."""
    if classes.dim() == 1:
        return {0: classes}
    columns = {}
    for axis in range(classes.dim()):
        slices = classes.movedim(axis, 0).reshape(classes.size(axis), -1)
        if (slices == slices[:, :1]).all() and (slices[:, 0] != slices[0, 0]).any():
            columns[axis] = slices[:, 0].contiguous()
    return columns


def _group_channels(
    classes: Mapping[Slot, torch.Tensor], pinned: set[int], book: LabelBook
) -> tuple[ChannelGroup, ...]:
    slots_of: dict[int, list[Slot]] = {}
    for slot, column in classes.items():
        for channel in dict.fromkeys(column.tolist()):
            slots_of.setdefault(channel, []).append(slot)
    channels_of: dict[tuple[Slot, ...], list[int]] = {}
    for channel, slots in slots_of.items():
        if channel not in pinned:
            channels_of.setdefault(tuple(slots), []).append(channel)
    only_read = book.consumed - book.produced
    return tuple(
        ChannelGroup(
            slots,
            tuple(channels),
            produced_slots=tuple(slot for slot in slots if slot in book.produced),
            consumed_slots=tuple(slot for slot in slots if slot in only_read),
            producers=tuple(
                dict.fromkeys(_owner_name(slot) for slot in slots if slot in book.produced)
            ),
            entries=tuple(int((classes[slot] == channels[0]).sum()) for slot in slots),
        )
        for slots, channels in channels_of.items()
        # Entries that no layer outputs were left out of this run, like positions past its length.
        if len(channels) > 1 and not book.produced.isdisjoint(slots)
    )


def _modules(slots: Iterable[Slot]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name, _ in slots))


def _owner_name(slot: Slot) -> str:
    """Return the module that holds a tensor, or the tensor if that is the outermost module."""
    return slot[0].rpartition(".")[0] or slot[0]
