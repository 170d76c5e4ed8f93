"""Rules for convolutions, normalisations and embeddings.

Statistics over channels, such as LayerNorm's mean, change when a channel is removed. They pin the
channels, unless ``LabelBook.across_norms`` is set. Then the calls are recorded, and the smaller
model takes the statistics over the channels that stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compress.pruning.dependency.rules.channel_labels import (
    WILD,
    LabelBook,
    Labels,
    Weight,
    channels_first,
    varies,
)
from compress.pruning.dependency.rules.op_call import COMPUTED, Call, Result, Rule, pin_layer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compress.pruning.dependency.rules.op_call import Call, Result

STATISTICS = ("mean", "sum", "var", "std", "linalg_vector_norm")
"""Reductions from which normalisations are written by hand."""


def convolution(call: Call, book: LabelBook) -> Result:
    """Read the weight's second axis and output its first; a depthwise one passes channels on."""
    weight = call["weight"]
    if not isinstance(weight, Weight):
        return pin_layer(call, book, COMPUTED)
    axis = len(call.shape) - len(weight.shape) + 1
    input_CX = channels_first(book.labels_of(call["input"]), axis)
    output_O = book.produce(weight, 0)
    groups: int = call["groups"]
    if groups > 1 and weight.shape[1] == 1:
        book.equate(input_CX[:, None], output_O.view(groups, -1, 1))
    else:
        # The weight has one set of columns for all groups: every group loses the same positions.
        book.consume(weight, (1,), input_CX.view(groups, weight.shape[1], -1).transpose(0, 1))
        book.equate(output_O.view(groups, -1), output_O.view(groups, -1)[:1])
    book.tie(call["bias"], output_O)
    return _along(output_O, axis, call.shape)


def transposed_convolution(call: Call, book: LabelBook) -> Result:
    """Read the weight's first axis and output its second, in groups or not."""
    weight = call["weight"]
    if not isinstance(weight, Weight):
        return pin_layer(call, book, COMPUTED)
    axis = len(call.shape) - len(weight.shape) + 1
    groups: int = call["groups"]
    book.consume(weight, (0,), channels_first(book.labels_of(call["input"]), axis))
    if groups > 1 and weight.shape[0] == groups:  # depthwise: each output belongs to its input
        output_O = book.produce(weight, 0).repeat_interleave(weight.shape[1])
    else:
        input_GI = book.axis(weight, 0).view(groups, -1)
        book.equate(input_GI, input_GI[:1])
        output_O = book.produce(weight, 1).repeat(groups)
    book.tie(call["bias"], output_O)
    return _along(output_O, axis, call.shape)


def batch_norm(call: Call, book: LabelBook) -> Result:
    """Pass channels on; scale, shift and statistics are tied to them."""
    labels = book.labels_of(call["input"])
    _tie_channels(call, book, ("weight", "bias", "running_mean", "running_var"))
    return labels


def group_norm(call: Call, book: LabelBook) -> Result:
    """Pass channels on; those of one group can only be removed together."""
    labels = book.labels_of(call["input"])
    groups: int = call["num_groups"]
    if groups == 1:
        return norm_over_channels(call, book)
    channels_GCX = channels_first(labels, 1)
    channels_GCX = channels_GCX.view(groups, -1, channels_GCX.shape[1])
    book.equate(channels_GCX, channels_GCX[:, :1])
    _tie_channels(call, book, ("weight", "bias"))
    return labels


def embedding(call: Call, book: LabelBook) -> Result:
    """Output the weight's second axis."""
    weight = call["weight"]
    if not isinstance(weight, Weight):
        return pin_layer(call, book, COMPUTED)
    # Axis 0 is indexed by words, so it has no channels.
    return book.produce(weight, 1).expand(call.shape)


def embedding_bag(call: Call, book: LabelBook) -> Result:
    """Output the weight's second axis, summed over words."""
    weight = call["weight"]
    if not isinstance(weight, Weight):
        return pin_layer(call, book, COMPUTED)
    rest = [torch.tensor(WILD).expand(shape) for shape in call.shapes[1:]]
    return [book.produce(weight, 1).expand(call.shape), *rest]


def _tie_channels(call: Call, book: LabelBook, names: tuple[str, ...]) -> None:
    """Tie a normalisation's parameters and statistics to the channels."""
    channels_CX = channels_first(book.labels_of(call["input"]), 1)
    for name in names:
        if call[name] is not None:
            book.tie(call[name], channels_CX.T)
    if call["weight"] is None:
        book.counted[call.module] = channels_CX[:, 0]


def _along(labels: Labels, axis: int, shape: tuple[int, ...]) -> Labels:
    return labels.view(-1, *[1] * (len(shape) - axis - 1)).expand(shape)


def norm_over_channels(call: Call, book: LabelBook) -> Result:
    """Pass channels on; scale and shift are tied to those over which statistics are taken."""
    labels = book.labels_of(call["input"])
    # LocalResponseNorm has no shape, as it goes over a window of channels.
    first = labels.dim() - len(call.get("normalized_shape") or ())
    axes = range(1 if call.operator == "group_norm" else first, labels.dim())
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


RULES: dict[str, Rule] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed_convolution
    ),
    **dict.fromkeys(("batch_norm", "instance_norm"), batch_norm),
    "group_norm": group_norm,
    **dict.fromkeys(("layer_norm", "rms_norm", "local_response_norm"), norm_over_channels),
    "embedding": embedding,
    "embedding_bag": embedding_bag,
}
