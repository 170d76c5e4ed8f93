"""Labels: which weight row each number inside a network came from.

One integer, a *label*, stands for one index of one weight axis. A tensor of labels has the shape of
an activation and says for each element which row made it. Rules for operators state which labels
are equal; equal labels form a *class*: entries that can only be removed together. A class that
holds a reason is pinned and never removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

Labels: TypeAlias = torch.Tensor
Slot: TypeAlias = tuple[str, int]
"""A tensor of the module and one of its axes."""

WILD = -1
"""The label of constants, which are as long as whatever they meet."""

_HALF = 1 << 31
_REASONS_SHOWN = 2


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer before an operator has said what its axes mean."""

    name: str
    shape: tuple[int, ...]
    is_constant: bool
    """Whether it has no channels: a single number, or a mask or index."""


class LabelBook:
    """Hands out labels and remembers which are equal and which are pinned, and why."""

    def __init__(self) -> None:
        self.axes: dict[Slot, Labels] = {}
        """Labels of the weight axes that an operator gave a meaning."""
        self.elements: dict[str, Labels] = {}
        """Labels of the weights that are used element by element, like a learned scale."""
        self.produced: set[Slot] = set()
        """The axes along which a layer makes its channels."""
        self.consumed: set[Slot] = set()
        """The axes along which a layer reads channels."""
        self.left_alone: dict[str, str] = {}
        """Layer that is not followed, so that its channels stay → why."""
        self._count = 0
        self._edges: list[torch.Tensor] = []
        self._reasons: dict[str, int] = {}

    def axis(self, weight: Weight, axis: int) -> Labels:
        """Return the labels of one axis of a weight."""
        slot = (weight.name, axis)
        if slot not in self.axes:
            self.axes[slot] = self._fresh(weight.shape[axis])
        return self.axes[slot]

    def rows(self, weight: Weight, axis: int) -> Labels:
        """Return the labels of the axis along which a layer makes its channels."""
        self.produced.add((weight.name, axis))
        return self.axis(weight, axis)

    def of(self, value: Labels | Weight) -> Labels:
        """Return an activation's labels; a weight's elements get a label each."""
        if isinstance(value, torch.Tensor):
            return value
        if value.is_constant:
            return torch.tensor(WILD).expand(value.shape)
        if value.name not in self.elements:
            count = int(np.prod(value.shape))
            self.elements[value.name] = self._fresh(count).view(value.shape)
        return self.elements[value.name]

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

    def consume(self, weight: Weight, axis: int, labels: Labels) -> None:
        """Remember that a layer reads channels: labels, channel axis first, go with its columns."""
        constant = self.pinned("it reads constants or integers")
        labels = torch.where(labels == WILD, constant, labels)
        self.consumed.add((weight.name, axis))
        columns = self.axis(weight, axis)
        self.equate(labels, columns.view(-1, *[1] * (labels.dim() - 1)))

    def follow(self, value: Labels | Weight | None, labels: Labels) -> None:
        """Remember that a bias or a per-channel statistic goes with a vector of labels."""
        if isinstance(value, Weight):
            self.equate(self.axis(value, 0), labels)
        elif value is not None:
            self.equate(self.of(value), labels)

    def pinned(self, reason: str) -> int:
        """Return the label that pins whatever equals it."""
        if reason not in self._reasons:
            self._reasons[reason] = int(self._fresh(1))
        return self._reasons[reason]

    def pin(self, value: Labels | Weight, reason: str) -> None:
        """Keep these entries as they are."""
        self.equate(self.of(value), torch.tensor(self.pinned(reason)))

    def solve(self) -> tuple[torch.Tensor, dict[int, str]]:
        """Return the class of each label, and why each pinned class is pinned."""
        start, end = torch.cat(self._edges, 1) if self._edges else torch.zeros(2, 0).long()
        matrix = coo_matrix((np.ones(len(start)), (start, end)), shape=(self._count, self._count))
        classes = torch.from_numpy(connected_components(matrix, directed=False)[1]).long()
        why: dict[int, list[str]] = {}
        for reason, label in self._reasons.items():
            why.setdefault(int(classes[label]), []).append(reason)
        return classes, {key: "; ".join(found[:_REASONS_SHOWN]) for key, found in why.items()}

    def _fresh(self, count: int) -> Labels:
        self._count += count
        return torch.arange(self._count - count, self._count)


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
