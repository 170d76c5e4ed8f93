"""Labels: which weight row each number inside a network came from.

One integer, a *label*, stands for one index of one weight axis. A tensor of labels has the shape of
an activation and says for each element which row made it. Rules for operators state which labels
are equal; equal labels form a *class*: entries that can only be removed together. A class that
holds a reason is pinned and never removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

if TYPE_CHECKING:
    from collections.abc import Iterable

Labels: TypeAlias = torch.Tensor
Slot: TypeAlias = tuple[str, int]
"""A tensor of the module and one of its axes."""

WILD = -1
"""The label of constants, which are as long as whatever they meet."""

STRETCHED = "it is stretched over other channels"

_HALF = 1 << 31
_REASONS_SHOWN = 2


Part: TypeAlias = tuple[str, tuple[int, ...]]
"""A tensor of the module and some of its axes, ascending, whose entries are told apart."""


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer, perhaps transposed, before an operator has said what its axes mean."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    """For each axis, which of the stored tensor's axes it is; None for one that was inserted."""
    is_constant: bool
    """Whether it has no channels: a single number, or a mask or index."""
    value: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """Its numbers, where it is a mask or an index that is known before the model runs."""


class LabelBook:
    """Hands out labels and remembers which are equal and which are pinned, and why."""

    def __init__(self) -> None:
        self.parts: dict[Part, Labels] = {}
        """Labels of the weight axes that an operator gave a meaning, alone or several together."""
        self.produced: set[Slot] = set()
        """The axes along which a layer makes its channels."""
        self.consumed: set[Slot] = set()
        """The axes along which a layer reads channels."""
        self.left_alone: dict[str, str] = {}
        """Layer that is not followed, so that its channels stay → why."""
        self.passed: dict[str, Labels] = {}
        """Layer without weights whose own attributes say how many channels pass → its channels."""
        self.is_moot = False
        """Whether what is computed now is never read: it may tie channels, and pins none."""
        self._count = 0
        self._edges: list[torch.Tensor] = []
        self._stretched: list[tuple[Labels, Labels]] = []
        self._reasons: dict[str, int] = {}

    def axis(self, weight: Weight, *axes: int) -> Labels:
        """Return the labels of an axis of a weight, or of several together, in the order given."""
        stored = [weight.axes[axis] for axis in axes]
        kept = sorted(axis for axis in stored if axis is not None)
        part = (weight.name, tuple(kept))
        if part not in self.parts:
            sizes = [weight.shape[weight.axes.index(axis)] for axis in kept]
            self.parts[part] = self._fresh(prod(sizes)).view(sizes)
        order = [kept.index(axis) for axis in stored if axis is not None]
        return self.parts[part].permute(order).reshape([weight.shape[axis] for axis in axes])

    def rows(self, weight: Weight, *axes: int) -> Labels:
        """Return the labels of the axes along which a layer makes its channels."""
        self.produced |= _slots(weight, axes)
        return self.axis(weight, *axes)

    def of(self, value: Labels | Weight) -> Labels:
        """Return an activation's labels; a weight's elements get a label each."""
        if isinstance(value, torch.Tensor):
            return value
        if value.is_constant:
            return torch.tensor(WILD).expand(value.shape)
        return self.axis(value, *range(len(value.shape)))

    def equate(self, left: Labels, right: Labels) -> None:
        """Remember that two broadcastable tensors of labels are equal, element by element."""
        shape = np.broadcast_shapes(tuple(left.shape), tuple(right.shape))
        left, right = left.expand(shape), right.expand(shape)
        for axis in range(left.dim()):
            if not varies(left, axis) and not varies(right, axis):
                left, right = left.narrow(axis, 0, 1), right.narrow(axis, 0, 1)
        differ = (left != right) & (left != WILD) & (right != WILD)
        if differ.any():
            pairs = torch.unique(left[differ] * _HALF + right[differ])
            self._edges.append(torch.stack([pairs // _HALF, pairs % _HALF]))

    def consume(self, weight: Weight, axes: tuple[int, ...], labels: Labels) -> None:
        """Remember that a layer reads channels: labels, channel axes first, go with its columns."""
        self.consumed |= _slots(weight, axes)
        columns = self.axis(weight, *axes)
        self.equate(labels, columns.reshape(*columns.shape, *[1] * (labels.dim() - len(axes))))

    def follow(self, value: Labels | Weight | None, labels: Labels) -> None:
        """Remember that a bias or a per-channel statistic goes with a vector of labels."""
        if isinstance(value, Weight) and len(value.shape) == 1:
            self.equate(self.axis(value, 0), labels)
        elif value is not None:
            self.equate(self.of(value), labels)

    def pinned(self, reason: str) -> int:
        """Return the label that pins whatever equals it."""
        if self.is_moot:
            return int(self._fresh(1))
        if reason not in self._reasons:
            self._reasons[reason] = int(self._fresh(1))
        return self._reasons[reason]

    def pin(self, value: Labels | Weight, reason: str) -> None:
        """Keep these entries as they are."""
        if self.is_moot:
            return
        self.equate(self.of(value), torch.tensor(self.pinned(reason)))

    def stretch(self, one: Labels, other: Labels) -> None:
        """Remember that an entry meets several channels: it goes if they leave only together."""
        if not self.is_moot:
            self._stretched.append((one, other))

    def settle(self) -> None:
        """Let stretched entries go with channels that leave only together; pin the others."""
        waiting, self._stretched = self._stretched, []
        while waiting:
            classes = torch.cat([self._classes(), torch.tensor([WILD])])  # WILD is the last index
            alike = [pair for pair in waiting if _is_alike(*pair, classes)]
            for one, other in alike:
                self.equate(one, other)
            waiting = [pair for pair in waiting if not any(pair is found for found in alike)]
            if not alike:
                break
        for one, _ in waiting:
            self.pin(one, STRETCHED)

    def is_table(self, labels: Labels) -> bool:
        """Return whether labels tell the elements of one weight apart, and no layer's channels."""
        first, last = int(labels.min()), int(labels.max())
        for (name, axes), part in reversed(self.parts.items()):
            if int(part.flatten()[0]) <= first:
                produced = any((name, axis) in self.produced for axis in axes)
                return len(axes) > 1 and not produced and last <= int(part.flatten()[-1])
        return False

    def is_pinned(self, labels: Labels) -> bool:
        """Return whether all of these are known to stay, by what was walked so far."""
        classes, reasons = self.solve()
        return set(classes[labels[labels != WILD]].tolist()) <= set(reasons)

    def solve(self) -> tuple[torch.Tensor, dict[int, str]]:
        """Return the class of each label, and why each pinned class is pinned."""
        classes = self._classes()
        why: dict[int, list[str]] = {}
        for reason, label in self._reasons.items():
            why.setdefault(int(classes[label]), []).append(reason)
        return classes, {key: "; ".join(found[:_REASONS_SHOWN]) for key, found in why.items()}

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


def _is_alike(one: Labels, other: Labels, classes: torch.Tensor) -> bool:
    """Whether all that each entry of one meets is of one class."""
    found = classes[other]
    axes = (axis for axis, size in enumerate(one.shape) if size == 1)
    return not any(varies(found, axis) for axis in axes)


def varies(labels: Labels, axis: int) -> bool:
    """Whether labels differ along an axis."""
    if labels.size(axis) <= 1 or labels.stride(axis) == 0:
        return False
    return bool((labels != labels.narrow(axis, 0, 1)).any())


def channels_first(labels: Labels, axis: int) -> Labels:
    """Return labels as a matrix of one axis by all others, the constant ones left out."""
    axis %= labels.dim()
    for other in range(labels.dim()):
        if other != axis and not varies(labels, other):
            labels = labels.narrow(other, 0, 1)
    return labels.movedim(axis, 0).reshape(labels.size(axis), -1)
