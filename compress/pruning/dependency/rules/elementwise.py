"""Rules for operators that are elementwise, pool over windows, or reduce an axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.pruning.dependency.rules.channel_labels import (
    BROADCAST,
    WILD,
    LabelBook,
    Labels,
    Weight,
    channels_first,
    varies,
)
from compress.pruning.dependency.rules.op_call import Call, Result, Rule, pin_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


STATISTICS = ("mean", "sum", "var", "std", "linalg_vector_norm")
"""Reductions from which normalisations are written by hand."""


def join(operands: list[Labels], shape: Sequence[int], book: LabelBook) -> Labels:
    """Equate the operands' labels and return those of the elementwise result.

    An operand that is broadcast over another's channels is pinned, unless these can only be removed
    together, like those of one head. In an outer product the side with most labels keeps its own.
    """
    padded = [x.reshape((1,) * (len(shape) - x.dim()) + tuple(x.shape)) for x in operands]
    for axis in range(len(shape)):
        if not any(varies(labels, axis) for labels in padded):
            padded = [labels.narrow(axis, 0, 1) for labels in padded]
    result = torch.full((1,) * len(shape), WILD)
    equal, broadcast = [], []
    for labels in padded:
        if any(
            labels.size(axis) == 1 and any(varies(other, axis) for other in padded)
            for axis in range(len(shape))
        ):
            broadcast.append(labels)
        else:
            book.equate(result, labels)
            result = torch.where(result == WILD, labels, result)
            equal.append(labels)
    # Of equal labels, those that vary along fewest axes show best which elements are coupled.
    complete = [labels for labels in equal if not (labels == WILD).any()]
    simplest = min([result, *complete], key=lambda x: len(_varying_axes(x)))
    if (simplest == WILD).all() and broadcast:
        simplest = max(broadcast, key=lambda side: torch.unique(side).numel())
        for labels in broadcast:
            if labels is not simplest:
                book.pin(labels, BROADCAST)
        return simplest.expand(shape)
    for labels in broadcast:
        axes = _varying_axes(labels)
        if axes and axes <= _varying_axes(simplest) and book.is_table(simplest):
            book.equate(labels, simplest)  # a table's entries may be coupled along the axis
            simplest = labels.expand(simplest.shape)
        else:
            book.broadcast(labels, simplest)
    return simplest.expand(shape)


def _varying_axes(labels: Labels) -> set[int]:
    return {axis for axis in range(labels.dim()) if varies(labels, axis)}


def pointwise(call: Call, book: LabelBook) -> Result:
    """Join all operands."""
    return join([book.labels_of(tensor) for tensor in call.tensors], call.shape, book)


def identity(call: Call, book: LabelBook) -> Result | Weight:
    """Pass the first tensor on; a weight stays a ``Weight``."""
    return call.tensors[0]


def constant(call: Call, book: LabelBook) -> Result:
    """Output a constant, whatever tensor gives its shape."""
    return call.results(WILD)


def prelu(call: Call, book: LabelBook) -> Result:
    """Pass channels on; the slope of each is tied to it."""
    labels = book.labels_of(call["self"])
    book.tie(call["weight"], channels_first(labels, min(1, labels.dim() - 1)).T)
    return labels


def gated(call: Call, book: LabelBook) -> Result:
    """Join the two halves of an axis."""
    halves = book.labels_of(call["self"]).chunk(2, call["dim"])
    return join(list(halves), call.shape, book)


def window(call: Call, book: LabelBook) -> Result:
    """Pool or resize the last 1, 2 or 3 axes: the digit in the operator's name."""
    labels = book.labels_of(call.tensors[0])
    count = int(next(letter for letter in call.operator if letter.isdigit()))
    coupled = couple_along(labels, range(-count, 0), book)
    if coupled is None:
        return pin_all(call, book, f"{call.operator} goes over its channels")
    results = [coupled.expand(shape) for shape in call.shapes]
    return results if call.gives_list else results[0]


def sample(call: Call, book: LabelBook) -> Result:
    """Sample pixels of every channel at computed positions."""
    book.pin(book.labels_of(call["grid"]), "it says where pixels are taken")
    labels = book.labels_of(call["input"])
    for axis in range(2, labels.dim()):
        if varies(labels, axis):
            return pin_all(call, book, f"{call.operator} goes over its channels")
        labels = labels.narrow(axis, 0, 1)
    return labels.expand(call.shape)


def patches(call: Call, book: LabelBook) -> Result:
    """Output, for each channel, a channel for each position of the window."""
    labels = book.labels_of(call["self"])
    if any(varies(labels, axis) for axis in (-1, -2)):
        return pin_all(call, book, f"{call.operator} goes over its channels")
    window = call.shape[-2] // labels.shape[-3]
    return labels[..., 0, :1].repeat_interleave(window, -2).expand(call.shape)


def pad(call: Call, book: LabelBook) -> Result:
    """Pad axes; a border within a channel belongs to it, and added channels are pinned."""
    labels = book.labels_of(call["self"])
    amounts: list[int] = call["pad"]
    for i in range(0, len(amounts), 2):
        axis, before, after = labels.dim() - 1 - i // 2, amounts[i], amounts[i + 1]
        if not varies(labels, axis):
            labels = _resized(labels, axis, call.shape[axis])
        elif min(before, after) < 0 or call.get("mode") not in (None, "constant"):
            return pin_all(call, book, "its channels are padded with more than constants")
        else:
            border = torch.tensor(book.pinned_label("it meets padding between channels"))
            border = border.expand(labels.narrow(axis, 0, 1).shape)
            left, right = (_resized(border, axis, size) for size in (before, after))
            labels = torch.cat([left, labels, right], axis)
    return labels


def reduction(call: Call, book: LabelBook) -> Result:
    """Reduce axes: channels reduced together can only be removed together, or not at all."""
    if call.get("other") is not None:  # torch.max of two tensors is elementwise
        return pointwise(call, book)
    labels = book.labels_of(call.tensors[0])
    axes = call.get("dim")
    if axes is None or axes == []:
        axes = range(labels.dim())
    axes = [axes] if isinstance(axes, int) else axes
    if call.operator in STATISTICS and record_statistics(call, book, labels, axes):
        return call.results(WILD)
    coupled = couple_along(labels, axes, book)
    if coupled is None:
        return pin_all(call, book, f"{call.operator} goes over its channels")
    labels = coupled
    same_axes = labels.dim() == len(call.shape)
    labels = labels.expand(call.shape) if same_axes else labels.reshape(call.shape)
    return [labels] * len(call.shapes) if call.gives_list else labels


def couple_along(labels: Labels, axes: Iterable[int], book: LabelBook) -> Labels | None:
    """Couple the channels along some axes, and return the labels with these axes narrowed to 1.

    Returns None if that would couple all channels.
    """
    over = {axis % labels.dim() for axis in axes}
    mixed = [axis for axis in over if varies(labels, axis)]
    if mixed and not any(varies(labels, i) for i in range(labels.dim()) if i not in over):
        return None
    for axis in over:
        if axis in mixed:
            book.equate(labels, labels.narrow(axis, 0, 1))
        labels = labels.narrow(axis, 0, 1)
    return labels


def _resized(labels: Labels, axis: int, size: int) -> Labels:
    shape = list(labels.shape)
    shape[axis] = size
    return labels.narrow(axis, 0, 1).expand(shape)


def record_statistics(call: Call, book: LabelBook, labels: Labels, axes: Iterable[int]) -> bool:
    """Record that a call reduces channels along one of some axes; return whether it does so.

    It does not where ``across_norms`` is not set, or where each index of another axis has channels
    of its own, such as a head.
    """
    mixed = [axis % labels.dim() for axis in axes if varies(labels, axis)]
    if not book.across_norms or len(mixed) != 1:
        return False
    (axis,) = mixed
    others = other_axes(labels, axes)
    if others and book.are_of_one_layer(labels, axis):
        return False
    # Positions, such as a class token and patches: all of them lose the same channels.
    for other in others:
        book.equate(labels, labels.narrow(other, 0, 1))
    along = channels_first(labels, axis)[:, 0]
    book.statistics[call.node] = axis, along
    book.counted[call.module] = along
    return True


def other_axes(labels: Labels, axes: Iterable[int]) -> list[int]:
    """Return the other axes along which labels vary."""
    over = {axis % labels.dim() for axis in axes}
    return [axis for axis in range(labels.dim()) if axis not in over and varies(labels, axis)]


RULES: dict[str, Rule] = {
    # Operators with torch.Tag.pointwise need no entry; these lack it (where only with scalars).
    **dict.fromkeys(("hardswish", "where"), pointwise),
    # These lack it in torch 2.11 and have it in 2.13; all but leaky_relu only when in-place.
    **dict.fromkeys(("leaky_relu", "elu", "celu", "selu", "hardtanh", "hardsigmoid"), pointwise),
    **dict.fromkeys(
        ("dropout", "feature_dropout", "alpha_dropout", "contiguous", "clone", "alias", "detach"),
        identity,
    ),
    **dict.fromkeys(("to", "_to_copy", "type_as", "lift_fresh_copy"), identity),
    **dict.fromkeys(  # constants, but of their argument's shape
        ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"), identity
    ),
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), constant),
    "prelu": prelu,
    "glu": gated,
    **dict.fromkeys(
        (
            *(f"{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)),
            *(f"adaptive_{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)),
            *(f"max_pool{n}d_with_indices" for n in (2, 3)),
            *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
            *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
            *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d"),
            "upsample_trilinear3d",
        ),
        window,
    ),
    **dict.fromkeys(("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"), sample),
    "im2col": patches,
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    **dict.fromkeys(
        ("mean", "sum", "amax", "amin", "max", "min", "var", "std", "logsumexp", "cumsum"),
        reduction,
    ),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), reduction),
    **dict.fromkeys(("argmax", "argmin", "linalg_vector_norm"), reduction),
}
