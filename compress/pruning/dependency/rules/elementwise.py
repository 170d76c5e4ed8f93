"""Rules for operators that work element by element, over windows, or reduce an axis."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.pruning.dependency.rules.channel_labels import (
    STRETCHED,
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


def join(operands: list[Labels], shape: Sequence[int], book: LabelBook) -> Labels:
    """Return the labels of an elementwise result, its operands' labels being made equal.

    An operand that is stretched over another's channels must itself stay, unless they are found to
    leave only together, like those of one head. Of an outer product the widest side keeps its own.
    """
    padded = [x.reshape((1,) * (len(shape) - x.dim()) + tuple(x.shape)) for x in operands]
    for axis in range(len(shape)):
        if not any(varies(labels, axis) for labels in padded):
            padded = [labels.narrow(axis, 0, 1) for labels in padded]
    result = torch.full((1,) * len(shape), WILD)
    equal, stretched = [], []
    for labels in padded:
        if any(
            labels.size(axis) == 1 and any(varies(other, axis) for other in padded)
            for axis in range(len(shape))
        ):
            stretched.append(labels)
        else:
            book.equate(result, labels)
            result = torch.where(result == WILD, labels, result)
            equal.append(labels)
    # Of equal labels those that change along fewest axes say most about which are alike.
    whole = [labels for labels in equal if not (labels == WILD).any()]
    plainest = min([result, *whole], key=lambda x: sum(varies(x, i) for i in range(x.dim())))
    if (plainest == WILD).all() and stretched:
        plainest = max(stretched, key=lambda side: torch.unique(side).numel())
        stretched = [labels for labels in stretched if labels is not plainest]
        for labels in stretched:
            book.pin(labels, STRETCHED)
    else:
        for labels in stretched:
            plainest = _stretch(labels, plainest, book)
    return plainest.expand(shape)


def _stretched(labels: Labels, every: set[int]) -> int:
    return sum(labels.size(axis) == 1 for axis in every)


def _stretch(labels: Labels, over: Labels, book: LabelBook) -> Labels:
    along, before = ({i for i in range(x.dim()) if varies(x, i)} for x in (labels, over))
    if along and along <= before and book.is_table(over):
        book.equate(labels, over)  # a table's entries may be tied along the axis
        return labels.expand(over.shape)
    book.stretch(labels, over)
    return over


def pointwise(call: Call, book: LabelBook) -> Result:
    """Join all operands."""
    return join([book.of(tensor) for tensor in call.tensors], call.shape, book)


def identity(call: Call, book: LabelBook) -> Result | Weight:
    """Pass the first tensor on; a weight stays one."""
    return call.tensors[0]


def constant(call: Call, book: LabelBook) -> Result:
    """Make a constant, whatever tensor it is shaped after."""
    return call.results(WILD)


def prelu(call: Call, book: LabelBook) -> Result:
    """Pass channels on; a slope for each goes with it."""
    labels = book.of(call["self"])
    book.follow(call["weight"], channels_first(labels, min(1, labels.dim() - 1)).T)
    return labels


def gated(call: Call, book: LabelBook) -> Result:
    """Join the two halves of an axis."""
    halves = book.of(call["self"]).chunk(2, call["dim"])
    return join(list(halves), call.shape, book)


def window(call: Call, book: LabelBook) -> Result:
    """Pool or resize the last axes, as many as the operator's name says."""
    labels = book.of(call.tensors[0])
    count = int(next(letter for letter in call.operator if letter.isdigit()))
    together = taken_together(labels, range(-count, 0), book)
    if together is None:
        return pin_all(call, book, f"{call.operator} goes over its channels")
    labels = together
    found = [labels.expand(shape) for shape in call.shapes]
    return found if call.gives_list else found[0]


def sample(call: Call, book: LabelBook) -> Result:
    """Take pixels of every channel at places that are computed."""
    book.pin(book.of(call["grid"]), "it says where pixels are taken")
    labels = book.of(call["input"])
    for axis in range(2, labels.dim()):
        if varies(labels, axis):
            return pin_all(call, book, f"{call.operator} goes over its channels")
        labels = labels.narrow(axis, 0, 1)
    return labels.expand(call.shape)


def patches(call: Call, book: LabelBook) -> Result:
    """Make a channel of each place in a window, for each channel."""
    labels = book.of(call["self"])
    if any(varies(labels, axis) for axis in (-1, -2)):
        return pin_all(call, book, f"{call.operator} goes over its channels")
    window = call.shape[-2] // labels.shape[-3]
    return labels[..., 0, :1].repeat_interleave(window, -2).expand(call.shape)


def pad(call: Call, book: LabelBook) -> Result:
    """Widen axes; a border around a channel belongs to it, and channels of zeros are pinned."""
    labels = book.of(call["self"])
    amounts: list[int] = call["pad"]
    for i in range(0, len(amounts), 2):
        axis, before, after = labels.dim() - 1 - i // 2, amounts[i], amounts[i + 1]
        if not varies(labels, axis):
            labels = _resized(labels, axis, call.shape[axis])
        elif min(before, after) < 0 or call.get("mode") not in (None, "constant"):
            return pin_all(call, book, "its channels are padded with more than constants")
        else:
            border = torch.tensor(book.pinned("it meets padding between channels"))
            border = border.expand(labels.narrow(axis, 0, 1).shape)
            left, right = (_resized(border, axis, size) for size in (before, after))
            labels = torch.cat([left, labels, right], axis)
    return labels


def reduction(call: Call, book: LabelBook) -> Result:
    """Drop axes: what is taken together along them can only leave together, or not at all."""
    if call.get("other") is not None:
        return pointwise(call, book)
    labels = book.of(call.tensors[0])
    axes = call.get("dim")
    if axes is None or axes == []:
        axes = range(labels.dim())
    together = taken_together(labels, [axes] if isinstance(axes, int) else axes, book)
    if together is None:
        return pin_all(call, book, f"{call.operator} goes over its channels")
    labels = together
    same_axes = labels.dim() == len(call.shape)
    labels = labels.expand(call.shape) if same_axes else labels.reshape(call.shape)
    return [labels] * len(call.shapes) if call.gives_list else labels


def taken_together(labels: Labels, axes: Iterable[int], book: LabelBook) -> Labels | None:
    """Return labels with axes narrowed to one entry, what lies along them leaving only together.

    None where that would be all channels.
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


RULES: dict[str, Rule] = {
    # torch tags elementwise operators, so they need no entry; this one it forgets.
    **dict.fromkeys(("hardswish", "where"), pointwise),
    **dict.fromkeys(
        ("dropout", "feature_dropout", "alpha_dropout", "contiguous", "clone", "alias", "detach"),
        identity,
    ),
    **dict.fromkeys(("to", "_to_copy", "type_as", "lift_fresh_copy"), identity),
    **dict.fromkeys(  # as long as what they are like
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
