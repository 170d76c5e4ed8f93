"""Rules for operators that only move data: they are run on the labels themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from compress.pruning.labels import WILD, LabelBook, Weight

if TYPE_CHECKING:
    from compress.pruning.operators import Call, Result, Rule


def reshape(call: Call, book: LabelBook) -> Result:
    """Give labels another shape."""
    return book.of(call.tensors[0]).reshape(call.shape)


def move(call: Call, book: LabelBook) -> Result:
    """Run the operator itself on labels."""
    arguments = pytree.tree_map(
        lambda value: book.of(value) if isinstance(value, Weight) else value, call.arguments
    )
    moved = call.target(**arguments)
    return list(moved) if call.gives_list else moved


def concatenate(call: Call, book: LabelBook) -> Result:
    """Join axes end to end; constants have a length of their own, so they pin where they lie."""
    parts = [book.of(part) for part in call["tensors"]]
    if any(bool((part != WILD).any()) for part in parts):
        constant = book.pinned("it lies beside constants")
        parts = [torch.where(part == WILD, constant, part) for part in parts]
    joined: torch.Tensor = call.target(parts, call["dim"])
    return joined


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), reshape),
    **dict.fromkeys(("view_as", "reshape_as", "squeeze", "unsqueeze"), reshape),
    **dict.fromkeys(("permute", "transpose", "t", "numpy_T", "movedim", "expand"), move),
    **dict.fromkeys(("expand_as", "select", "slice", "narrow", "unbind", "chunk"), move),
    **dict.fromkeys(("split", "split_with_sizes", "tensor_split", "unsafe_chunk"), move),
    **dict.fromkeys(("roll", "flip", "repeat", "repeat_interleave", "unfold"), move),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"), move),
    **dict.fromkeys(("cat", "concat", "stack"), concatenate),
}
