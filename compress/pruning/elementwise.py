"""Rules for operators that work element by element, over windows, or reduce an axis."""

from __future__ import annotations

import torch

from compress.pruning.labels import WILD, LabelBook, Labels, channels_first, varies
from compress.pruning.operators import Call, Result, Rule, pin_all


def join(operands: list[Labels], shape: tuple[int, ...], book: LabelBook) -> Labels:
    """Return the labels of an elementwise result, its operands' labels being made equal.

    An operand that is stretched over another's channels must itself stay: it is pinned.
    """
    padded = [x.reshape((1,) * (len(shape) - x.dim()) + tuple(x.shape)) for x in operands]
    result = torch.full((1,) * len(shape), WILD)
    for labels in padded:
        if any(
            labels.size(axis) == 1 and any(varies(other, axis) for other in padded)
            for axis in range(len(shape))
        ):
            book.pin(labels, "it is stretched over other channels")
        else:
            book.equate(result, labels)
            result = torch.where(result == WILD, labels, result)
    return result.expand(shape)


def pointwise(call: Call, book: LabelBook) -> Result:
    """Join all operands."""
    return join([book.of(tensor) for tensor in call.tensors], call.shape, book)


def identity(call: Call, book: LabelBook) -> Result:
    """Pass the first tensor on."""
    return book.of(call.tensors[0])


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
    for axis in range(labels.dim() - count, labels.dim()):
        if varies(labels, axis):
            return pin_all(call, book, f"{call.operator} goes over its channels")
        labels = labels.narrow(axis, 0, 1)
    found = [labels.expand(shape) for shape in call.shapes]
    return found if call.gives_list else found[0]


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
    """Drop axes along which every element has the same label; otherwise pin."""
    if call.get("other") is not None:
        return pointwise(call, book)
    labels = book.of(call.tensors[0])
    axes = call.get("dim")
    if axes is None or axes == []:
        axes = range(labels.dim())
    for axis in [axes] if isinstance(axes, int) else axes:
        if varies(labels, axis):
            return pin_all(call, book, f"{call.operator} goes over its channels")
        labels = labels.narrow(axis, 0, 1)
    same_axes = labels.dim() == len(call.shape)
    labels = labels.expand(call.shape) if same_axes else labels.reshape(call.shape)
    return [labels] * len(call.shapes) if call.gives_list else labels


def _resized(labels: Labels, axis: int, size: int) -> Labels:
    shape = list(labels.shape)
    shape[axis] = size
    return labels.narrow(axis, 0, 1).expand(shape)


RULES: dict[str, Rule] = {
    # torch tags elementwise operators, so they need no entry; this one it forgets.
    "hardswish": pointwise,
    **dict.fromkeys(
        ("dropout", "feature_dropout", "alpha_dropout", "contiguous", "clone", "alias", "detach"),
        identity,
    ),
    **dict.fromkeys(("to", "_to_copy", "type_as", "lift_fresh_copy"), identity),
    **dict.fromkeys(
        ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones"), constant
    ),
    **dict.fromkeys(("new_full", "new_empty"), constant),
    "prelu": prelu,
    "glu": gated,
    **dict.fromkeys(
        (
            *(f"{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)),
            *(f"adaptive_{kind}_pool{n}d" for kind in ("max", "avg") for n in (1, 2, 3)),
            *(f"max_pool{n}d_with_indices" for n in (2, 3)),
            *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
            *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d"),
        ),
        window,
    ),
    **dict.fromkeys(("pad", "constant_pad_nd"), pad),
    **dict.fromkeys(
        ("mean", "sum", "amax", "amin", "max", "min", "var", "std", "logsumexp", "cumsum"),
        reduction,
    ),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), reduction),
    **dict.fromkeys(("argmax", "argmin", "linalg_vector_norm"), reduction),
}
