"""Rules for operators that only move data: they are run on the labels themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from compress.pruning.dependency.rules.channel_labels import WILD, LabelBook, Labels, Weight, varies
from compress.pruning.dependency.rules.elementwise import taken_together
from compress.pruning.dependency.rules.op_call import pin_all

if TYPE_CHECKING:
    from compress.pruning.dependency.rules.op_call import Call, Result, Rule


def reshape(call: Call, book: LabelBook) -> Result | Weight:
    """Give labels another shape; a weight stays one where only axes of size 1 come or go."""
    value = call.tensors[0]
    if isinstance(value, Weight):
        sizes, shape = ([n for n in x if n != 1] for x in (value.shape, call.shape))
        if sizes == shape:
            axes = iter([a for a, n in zip(value.axes, value.shape, strict=True) if n != 1])
            order = tuple(None if n == 1 else next(axes) for n in call.shape)
            return replace(value, shape=call.shape, axes=order)
    return book.of(value).reshape(call.shape)


def permute(call: Call, book: LabelBook) -> Result | Weight:
    """Put axes in another order; a weight stays one."""
    value = next(iter(call.tensors))
    if not isinstance(value, Weight):
        return move(call, book)
    places = torch.arange(len(value.shape)).view(1, -1)  # run on a tensor whose sizes are places
    sizes = torch.empty([2 + int(i) for i in places[0]], device="meta")
    moved = call.target(**{**call.arguments, "self": sizes}).shape
    return replace(value, shape=call.shape, axes=tuple(value.axes[n - 2] for n in moved))


def move(call: Call, book: LabelBook) -> Result:
    """Run the operator itself on labels."""
    arguments = pytree.tree_map(
        lambda value: book.of(value) if isinstance(value, Weight) else value, call.arguments
    )
    moved = call.target(**arguments)
    return list(moved) if call.gives_list else moved


def pick(call: Call, book: LabelBook) -> Result:
    """Pick entries by indices: known ones are used, along other axes all leave only together."""
    value = call["self"]
    labels = book.of(value)
    indices = call.get("indices") or _on_axis(call["index"], call["dim"] % labels.dim())
    known = [getattr(index, "value", None) for index in indices]
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    if not isinstance(value, Weight):
        if call.operator == "index" and all(known[axis] is not None for axis in axes):
            return _picked(labels, known)
    else:
        for axis in axes:
            book.equate(labels, labels.narrow(axis, 0, 1))  # a table, whose rows all stay
            labels = labels.narrow(axis, 0, 1)
    together = taken_together(labels, axes, book)
    if together is None:
        return pin_all(call, book, f"{call.operator} picks some of its channels")
    if call.operator == "index":
        firsts = [i if i is None else torch.zeros(i.shape, dtype=torch.int64) for i in indices]
        return _picked(together, firsts)
    for axis, size in enumerate(call.shape):
        together = together.narrow(axis, 0, size if varies(together, axis) else 1)
    return together.expand(call.shape)


def _picked(labels: Labels, indices: list[torch.Tensor | None]) -> Labels:
    picked: Labels = torch.ops.aten.index(labels, indices)
    return picked


def _on_axis(index: Any, axis: int) -> list[Any]:
    return [*[None] * axis, index]


def concatenate(call: Call, book: LabelBook) -> Result:
    """Join axes end to end; constants have a length of their own, so they pin where they lie."""
    parts = [book.of(part) for part in call["tensors"]]
    if any(bool((part != WILD).any()) for part in parts):
        constant = book.pinned("it lies beside constants")
        parts = [torch.where(part == WILD, constant, part) for part in parts]
    for axis in range(parts[0].dim()):  # of axes without channels one place is enough
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
