"""Statistics over channels, such as LayerNorm's mean: they change when a channel is removed.

They pin the channels, unless ``LabelBook.across_norms`` is set. Then the calls are recorded, and
the smaller model takes the statistics over the channels that stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.pruning.dependency.rules.channel_labels import (
    LabelBook,
    Labels,
    Weight,
    channels_first,
    varies,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compress.pruning.dependency.rules.op_call import Call, Result

STATISTICS = ("mean", "sum", "var", "std", "linalg_vector_norm")
"""Reductions from which normalisations are written by hand."""


def norm_over_channels(call: Call, book: LabelBook) -> Result:
    """Pass channels on; scale and shift are tied to those over which statistics are taken."""
    labels = book.labels_of(call["input"])
    axes = _normalised_axes(call, labels.dim())
    mixed = [axis for axis in axes if varies(labels, axis)]
    if record_statistics(call, book, labels, axes):
        for name in ("weight", "bias"):
            value = call.get(name)
            one_axis = isinstance(value, Weight) and len(value.shape) == 1
            book.tie(value, labels.movedim(mixed[0], -1) if one_axis else labels)
    elif book.across_norms and axes and (not mixed or _other_axes(labels, axes)):
        for axis in mixed:  # such as heads: each of them is normalised alone, and stays whole
            book.equate(labels, labels.narrow(axis, 0, 1))
    else:
        book.pin(labels, f"{call.operator} takes statistics over its channels")
    return labels


def record_statistics(call: Call, book: LabelBook, labels: Labels, axes: Iterable[int]) -> bool:
    """Record that a call reduces channels along one of some axes; return whether it does so.

    It does not where ``across_norms`` is not set, or where each index of another axis has channels
    of its own, such as a head.
    """
    mixed = [axis % labels.dim() for axis in axes if varies(labels, axis)]
    if not book.across_norms or len(mixed) != 1:
        return False
    (axis,) = mixed
    others = _other_axes(labels, axes)
    if others and book.are_of_one_layer(labels, axis):
        return False
    # Positions, such as a class token and patches: all of them lose the same channels.
    for other in others:
        book.equate(labels, labels.narrow(other, 0, 1))
    along = channels_first(labels, axis)[:, 0]
    book.statistics[call.node] = axis, along
    book.counted[call.module] = along
    return True


def _other_axes(labels: Labels, axes: Iterable[int]) -> list[int]:
    """Return the other axes along which labels vary."""
    over = {axis % labels.dim() for axis in axes}
    return [axis for axis in range(labels.dim()) if axis not in over and varies(labels, axis)]


def _normalised_axes(call: Call, dimensions: int) -> list[int]:
    """Return the axes that a normalisation takes statistics over; none where it has a window."""
    if call.operator == "group_norm":
        return list(range(1, dimensions))
    return list(range(dimensions - len(call.get("normalized_shape") or ()), dimensions))
