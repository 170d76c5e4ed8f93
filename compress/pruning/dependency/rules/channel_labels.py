"""Channel labels: which weight row produced each element of an activation.

One integer, a *label*, stands for one index of one weight axis. A tensor of labels has the shape of
an activation and holds for each element the label of the row that produced it. Rules for operators
state which labels are equal; equal labels form a *class*: entries that can only be removed
together. A class with a reason is pinned and never removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

Labels: TypeAlias = torch.Tensor
Slot: TypeAlias = tuple[str, int]
"""A tensor of the module and one of its axes."""

WILD = -1  # the label of constants, which broadcast to any number of channels

BROADCAST = "it is stretched over other channels"

# Two labels are packed into one int64, so that torch.unique runs on a vector of pairs.
_HALF = 1 << 31
_REASONS_SHOWN = 2

Part: TypeAlias = tuple[str, tuple[int, ...]]
"""A tensor of the module and some of its axes, ascending, whose entries have labels."""


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer, perhaps transposed, whose axes no operator has interpreted yet."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    """For each axis, the stored tensor's axis; None for an inserted axis of size 1."""
    is_constant: bool
    """Whether it has no channels: a single number, or a mask or index."""
    value: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """Its values, if it is a mask or an index that does not depend on the input."""


@dataclass
class LabelBook:
    """The labels of a graph: which exist, which are equal, and which are pinned and why."""

    parts: dict[Part, Labels] = field(default_factory=dict)
    """Labels of the weight axes that operators used as channels, alone or several together."""
    produced: set[Slot] = field(default_factory=set)
    """The axes along which layers output channels."""
    consumed: set[Slot] = field(default_factory=set)
    """The axes along which layers read channels."""
    opaque_layers: dict[str, str] = field(default_factory=dict)
    """Layer whose channels cannot be followed, so that they stay → why."""
    counted: dict[str, Labels] = field(default_factory=dict)
    """Layer whose attributes count the channels of its input → their labels."""
    across_norms: bool = False
    """Whether channels may be removed over which statistics are taken, as by LayerNorm."""
    statistics: dict[str, tuple[int, Labels]] = field(default_factory=dict)
    """Node that takes statistics over channels → the axis of its input, and their labels."""
    sizes: dict[tuple[int, int], list[tuple[int | tuple[int, ...], Labels]]] = field(
        default_factory=dict
    )
    """Call of the model's code, among those recorded, and index of a size that it gives to an axis
    whose labels vary → each time the size, or those of the parts of the axis, and the labels,
    `(axis size, others)`."""
    is_dead_code: bool = False
    """Whether the current operator's result is unused: it can couple channels, not pin them."""
    _count: int = 0
    """Labels handed out so far."""
    _edges: list[torch.Tensor] = field(default_factory=list)
    """Pairs of equal labels, `(2, pairs)` each."""
    _broadcasts: list[tuple[Labels, Labels]] = field(default_factory=list)
    _split: list[Labels] = field(default_factory=list)
    """Labels of axes that were one axis before."""
    _reasons: dict[str, int] = field(default_factory=dict)
    """Reason → the label that is pinned for it."""

    def axis(self, weight: Weight, *axes: int) -> Labels:
        """Return the labels of one axis of a weight, or of several in the given order."""
        stored = [weight.axes[axis] for axis in axes]
        kept = sorted(axis for axis in stored if axis is not None)
        part = (weight.name, tuple(kept))
        if part not in self.parts:
            sizes = [weight.shape[weight.axes.index(axis)] for axis in kept]
            self.parts[part] = self._fresh(prod(sizes)).view(sizes)
        order = [kept.index(axis) for axis in stored if axis is not None]
        return self.parts[part].permute(order).reshape([weight.shape[axis] for axis in axes])

    def produce(self, weight: Weight, *axes: int) -> Labels:
        """Return the labels of the weight axes along which a layer outputs its channels."""
        self.produced |= _slots(weight, axes)
        return self.axis(weight, *axes)

    def labels_of(self, value: Labels | Weight) -> Labels:
        """Return an activation's labels; each element of a weight has a label of its own."""
        if isinstance(value, torch.Tensor):
            return value
        if value.is_constant:  # expanded, which takes no memory
            return torch.tensor(WILD).expand(value.shape)
        return self.axis(value, *range(len(value.shape)))

    def equate(self, left: Labels, right: Labels) -> None:
        """State that two broadcastable tensors of labels are equal, element by element."""
        shape = np.broadcast_shapes(tuple(left.shape), tuple(right.shape))
        left, right = left.expand(shape), right.expand(shape)
        # One entry of an axis along which neither varies stands for all.
        for axis in range(left.dim()):
            if not varies(left, axis) and not varies(right, axis):
                left, right = left.narrow(axis, 0, 1), right.narrow(axis, 0, 1)
        differ = (left != right) & (left != WILD) & (right != WILD)
        if differ.any():
            pairs = torch.unique(left[differ] * _HALF + right[differ])
            self._edges.append(torch.stack([pairs // _HALF, pairs % _HALF]))

    def consume(self, weight: Weight, axes: tuple[int, ...], labels: Labels) -> None:
        """State that a weight's columns read channels; labels have channel axes first."""
        self.consumed |= _slots(weight, axes)
        columns = self.axis(weight, *axes)
        self.equate(labels, columns.reshape(*columns.shape, *[1] * (labels.dim() - len(axes))))

    def tie(self, value: Labels | Weight | None, labels: Labels) -> None:
        """State that a bias or a per-channel statistic has the labels of the channels."""
        if isinstance(value, Weight) and len(value.shape) == 1:
            self.equate(self.axis(value, 0), labels)
        elif value is not None:
            self.equate(self.labels_of(value), labels)

    def pinned_label(self, reason: str) -> int:
        """Return the label that pins every label equal to it."""
        if self.is_dead_code:
            return int(self._fresh(1))
        if reason not in self._reasons:
            self._reasons[reason] = int(self._fresh(1))
        return self._reasons[reason]

    def pin(self, value: Labels | Weight, reason: str) -> None:
        """State that these entries can never be removed."""
        if self.is_dead_code:
            return
        self.equate(self.labels_of(value), torch.tensor(self.pinned_label(reason)))

    def broadcast(self, narrow: Labels, wide: Labels) -> None:
        """State that each entry of ``narrow`` is broadcast over several entries of ``wide``.

        It can be removed with them if they turn out to be of one class.
        """
        if not self.is_dead_code:
            self._broadcasts.append((narrow, wide))

    def split(self, labels: Labels) -> None:
        """State that one axis was split into several, along which these labels vary.

        What stays must again be a product of axes. So where entries are not coupled along all of
        these axes but one, they are coupled so that the longest of them can be cut.
        """
        if not self.is_dead_code:
            self._split.append(labels)

    def resolve(self) -> tuple[torch.Tensor, dict[int, str]]:
        """Resolve all statements; return the class of each label, and why classes are pinned.

        Broadcast entries are equated with channels if those are of one class, and pinned otherwise.
        """
        # Operators may have labelled an axis in several combinations with others.
        parts_of: dict[str, list[tuple[int, ...]]] = {}
        for name, axes in self.parts:
            for others in parts_of.setdefault(name, []):
                if not set(axes).isdisjoint(others):
                    every = sorted({*axes, *others})
                    self.equate(self._spread(name, axes, every), self._spread(name, others, every))
            parts_of[name].append(axes)
        pending = self._with_resolved(self._broadcasts)
        # After what else couples entries, as heads are coupled by attention.
        for labels in self._split:
            classes = self._classes_and_wild()[labels]
            varied = [axis for axis in range(labels.dim()) if labels.shape[axis] > 1]
            if not any((classes == _along(classes, axis)).all() for axis in varied):
                self.equate(
                    labels, _along(labels, max(varied, key=lambda axis: labels.shape[axis]))
                )
        for narrow, _ in self._with_resolved(pending):
            self.pin(narrow, BROADCAST)
        return self.solve()

    def _with_resolved(self, pending: list[tuple[Labels, Labels]]) -> list[tuple[Labels, Labels]]:
        """Equate what is broadcast over channels of one class; return the others."""
        while pending:
            classes = self._classes_and_wild()
            unresolved = []
            for narrow, wide in pending:
                wide_classes = classes[wide]
                if any(varies(wide_classes, i) for i, n in enumerate(narrow.shape) if n == 1):
                    unresolved.append((narrow, wide))
                else:
                    self.equate(narrow, wide)
            # Each round can make more entries one class, so those left are tried again.
            if len(unresolved) == len(pending):
                break
            pending = unresolved
        return pending

    def _classes_and_wild(self) -> torch.Tensor:
        """Return the class of each label so far; the last entry, at index WILD, is WILD."""
        return torch.cat([self._classes(), torch.tensor([WILD])])

    def _spread(self, name: str, axes: tuple[int, ...], every: list[int]) -> Labels:
        """View the labels of some axes of a tensor with axes of size 1 in place of the others."""
        labels = self.parts[name, axes]
        return labels.view([labels.shape[axes.index(a)] if a in axes else 1 for a in every])

    def is_table(self, labels: Labels) -> bool:
        """Whether labels are of single elements of one weight, along axes that no layer outputs."""
        first, last = int(labels.min()), int(labels.max())
        for (name, axes), part in reversed(self.parts.items()):
            if int(part.flatten()[0]) <= first:
                produced = any((name, axis) in self.produced for axis in axes)
                return len(axes) > 1 and not produced and last <= int(part.flatten()[-1])
        return False

    def are_of_one_layer(self, labels: Labels, axis: int) -> bool:
        """Whether at some index of an axis several labels are of one layer, like those of heads."""
        rows = channels_first(labels, axis)
        layers = [
            (int(part.min()), int(part.max()))
            for (name, axes), part in self.parts.items()
            if any((name, own) in self.produced for own in axes)
        ]
        starts = torch.tensor([first for first, _ in layers])
        holders = torch.searchsorted(starts, rows.contiguous(), right=True) - 1
        for i in torch.unique(holders).tolist():
            first, last = layers[i]
            is_own = (rows >= first) & (rows <= last)
            lowest, highest = rows.where(is_own, last).amin(1), rows.where(is_own, first).amax(1)
            if (lowest < highest).any():
                return True
        return False

    def is_pinned(self, labels: Labels) -> bool:
        """Whether all of these labels are pinned by the operators seen so far."""
        classes, reasons = self.solve()
        return set(classes[labels[labels != WILD]].tolist()) <= set(reasons)

    def solve(self) -> tuple[torch.Tensor, dict[int, str]]:
        """Return the class of each label so far, and why each pinned class is pinned."""
        classes = self._classes()
        why: dict[int, list[str]] = {}
        for reason, label in self._reasons.items():
            why.setdefault(int(classes[label]), []).append(reason)
        return classes, {key: "; ".join(reasons[:_REASONS_SHOWN]) for key, reasons in why.items()}

    def _classes(self) -> torch.Tensor:
        start, end = torch.cat(self._edges, 1) if self._edges else torch.zeros(2, 0).long()
        matrix = coo_matrix((np.ones(len(start)), (start, end)), shape=(self._count, self._count))
        return torch.from_numpy(connected_components(matrix, directed=False)[1]).long()

    def _fresh(self, count: int) -> Labels:
        self._count += count
        return torch.arange(self._count - count, self._count)


def _slots(weight: Weight, axes: Iterable[int]) -> set[Slot]:
    stored = (weight.axes[axis] for axis in axes)
    return {(weight.name, axis) for axis in stored if axis is not None}


def _along(labels: Labels, axis: int) -> Labels:
    """Return the first entry of each index of an axis."""
    for other in range(labels.dim()):
        labels = labels if other == axis else labels.narrow(other, 0, 1)
    return labels


def varies(labels: Labels, axis: int) -> bool:
    """Whether labels differ along an axis."""
    # An expanded axis has stride 0, so nothing has to be compared.
    if labels.size(axis) <= 1 or labels.stride(axis) == 0:
        return False
    return bool((labels != labels.narrow(axis, 0, 1)).any())


def channels_first(labels: Labels, axis: int) -> Labels:
    """Reshape labels to `(axis size, others)`, without axes along which they do not vary."""
    axis %= labels.dim()
    for other in range(labels.dim()):
        if other != axis and not varies(labels, other):
            labels = labels.narrow(other, 0, 1)
    return labels.movedim(axis, 0).reshape(labels.size(axis), -1)
