"""Rules for operators that only move data: the operator itself runs on the labels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from compress.pruning.dependency.rules.channel_labels import WILD, LabelBook, Labels, Weight, varies
from compress.pruning.dependency.rules.elementwise import couple_along
from compress.pruning.dependency.rules.op_call import pin_all

if TYPE_CHECKING:
    from compress.pruning.dependency.rules.op_call import Call, Result, Rule


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
        lambda value: book.labels_of(value) if isinstance(value, Weight) else value,
        call.arguments,
    )
    moved = call.target(**arguments)
    return list(moved) if call.gives_list else moved


def pick(call: Call, book: LabelBook) -> Result:
    """Select by indices: constant ones are applied, others couple all entries of their axis."""
    value = call["self"]
    labels = book.labels_of(value)
    indices = call.get("indices") or [
        *[None] * (call["dim"] % labels.dim()),
        call["index"],
    ]
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
