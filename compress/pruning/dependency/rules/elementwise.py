"""Rules for operators that are elementwise, pool over windows, reduce an axis, or move data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch.utils import _pytree as pytree

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


def reshape(call: Call, book: LabelBook) -> Result | Weight:
    """Reshape labels; a weight stays a ``Weight`` if only axes of size 1 are added or dropped."""
    value = call.tensors[0]
    if isinstance(value, Weight):
        sizes, shape = ([n for n in x if n != 1] for x in (value.shape, call.shape))
        if sizes == shape:
            axes = iter([a for a, n in zip(value.axes, value.shape, strict=True) if n != 1])
            order = tuple(None if n == 1 else next(axes) for n in call.shape)
            return replace(value, shape=call.shape, axes=order)
    labels = book.labels_of(value)
    result = labels.reshape(call.shape)
    varying = [axis for axis in range(result.dim()) if varies(result, axis)]
    if len(varying) > sum(varies(labels, axis) for axis in range(labels.dim())):
        some = result
        for axis in set(range(result.dim())) - {*varying}:
            some = some.narrow(axis, 0, 1)
        book.split(some)
    return result


def permute(call: Call, book: LabelBook) -> Result | Weight:
    """Permute axes; a weight stays a ``Weight``."""
    value = next(iter(call.tensors))
    if not isinstance(value, Weight):
        return move(call, book)
    # Permute a tensor whose axis i has size i + 2: the sizes of the result show the order of axes.
    numbered = torch.empty([2 + i for i in range(len(value.shape))], device="meta")
    moved = call.target(**{**call.arguments, "self": numbered}).shape
    return replace(value, shape=call.shape, axes=tuple(value.axes[n - 2] for n in moved))


def move(call: Call, book: LabelBook) -> Result:
    """Run the operator itself on the labels."""
    arguments = pytree.tree_map(
        lambda value: book.labels_of(value) if isinstance(value, Weight) else value, call.arguments
    )
    moved = call.target(**arguments)
    return list(moved) if call.gives_list else moved


def pick(call: Call, book: LabelBook) -> Result:
    """Select by indices: constant ones are applied, others couple all entries of their axis."""
    value = call["self"]
    labels = book.labels_of(value)
    indices = call.get("indices") or [*[None] * (call["dim"] % labels.dim()), call["index"]]
    known = [getattr(index, "value", None) for index in indices]
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    if not isinstance(value, Weight):
        if call.operator == "index" and all(known[axis] is not None for axis in axes):
            return _picked(labels, known)
    else:
        for axis in axes:
            book.equate(labels, labels.narrow(axis, 0, 1))  # a table, whose rows all stay
            labels = labels.narrow(axis, 0, 1)
    coupled = couple_along(labels, axes, book)
    if coupled is None:
        return pin_all(call, book, f"{call.operator} picks some of its channels")
    if call.operator == "index":
        firsts = [i if i is None else torch.zeros(i.shape, dtype=torch.int64) for i in indices]
        return _picked(coupled, firsts)
    for axis, size in enumerate(call.shape):
        coupled = coupled.narrow(axis, 0, size if varies(coupled, axis) else 1)
    return coupled.expand(call.shape)


def _picked(labels: Labels, indices: list[torch.Tensor | None]) -> Labels:
    picked: Labels = torch.ops.aten.index(labels, indices)
    return picked


def concatenate(call: Call, book: LabelBook) -> Result:
    """Concatenate; constants among the parts have fixed positions, so their entries are pinned."""
    parts = [book.labels_of(part) for part in call["tensors"]]
    if any(bool((part != WILD).any()) for part in parts):
        constant = book.pinned_label("it lies beside constants")
        parts = [torch.where(part == WILD, constant, part) for part in parts]
    for axis in range(parts[0].dim()):  # of axes without channels one position is enough
        is_joined = call.operator != "stack" and axis == call["dim"] % parts[0].dim()
        if not is_joined and not any(varies(part, axis) for part in parts):
            parts = [part.narrow(axis, 0, 1) for part in parts]
    joined: torch.Tensor = call.target(parts, call["dim"])
    return joined.expand(call.shape)


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
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), reshape),
    **dict.fromkeys(("view_as", "reshape_as", "squeeze", "unsqueeze"), reshape),
    **dict.fromkeys(("permute", "transpose", "t", "numpy_T", "mT", "matrix_H", "movedim"), permute),
    **dict.fromkeys(("index", "index_select", "gather", "take_along_dim"), pick),
    **dict.fromkeys(("expand", "expand_as", "select", "slice", "narrow", "unbind", "chunk"), move),
    **dict.fromkeys(("split", "split_with_sizes", "tensor_split", "unsafe_chunk"), move),
    **dict.fromkeys(("roll", "flip", "repeat", "repeat_interleave", "unfold"), move),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"), move),
    **dict.fromkeys(("cat", "concat", "stack"), concatenate),
}
