"""Rules for convolutions, normalisations, embeddings and recurrent layers.

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
from compress.pruning.dependency.rules.elementwise import join, other_axes, record_statistics
from compress.pruning.dependency.rules.op_call import COMPUTED, Call, Result, Rule, pin_layer

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    """Output the weight's second axis; that of a bag is summed over words."""
    weight = call["weight"]
    if not isinstance(weight, Weight):
        return pin_layer(call, book, COMPUTED)
    # Axis 0 is indexed by words, so it has no channels.
    labels = book.produce(weight, 1).expand(call.shape)
    if not call.gives_list:
        return labels
    return [labels, *(torch.tensor(WILD).expand(shape) for shape in call.shapes[1:])]


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
    elif book.across_norms and axes and (not mixed or other_axes(labels, axes)):
        for axis in mixed:  # such as heads: each of them is normalised alone, and stays whole
            book.equate(labels, labels.narrow(axis, 0, 1))
    else:
        book.pin(labels, f"{call.operator} takes statistics over its channels")
    return labels


def recurrent(call: Call, book: LabelBook) -> Result:
    """Couple the gates of each hidden unit over all layers and directions (of equal width)."""
    parameters = call.get("params")
    if parameters is None:
        return pin_layer(call, book, f"{call.operator} over packed sequences")
    if not all(isinstance(p, Weight) for p in parameters):
        return pin_layer(call, book, COMPUTED)
    directions = 2 if call["bidirectional"] else 1
    count = len(parameters) // (call["num_layers"] * directions)
    cells = [parameters[i : i + count] for i in range(0, len(parameters), count)]
    labels = book.labels_of(call["input"])
    hidden: list[Labels] = []
    outputs: list[Labels] = []
    for first in range(0, len(cells), directions):
        for weights in cells[first : first + directions]:
            hidden_H, output_P = _cell(book, labels, weights)
            hidden.append(hidden_H)
            outputs.append(output_P)
        for same_width in (hidden, outputs):
            for other in same_width[1:]:
                book.equate(other, same_width[0])
        labels = outputs[0].repeat(directions)
    # Only an LSTM has a cell state besides the hidden one.
    ends = zip((outputs[0], hidden[0]), call.shapes[1:], strict=False)
    last = [labels_H.expand(shape) for labels_H, shape in ends]
    state = call.get("hx")
    states = state if isinstance(state, list) else [state]
    for initial, final in zip(states, last, strict=True):
        join([final, book.labels_of(initial)], tuple(final.shape), book)
    return [labels.expand(call.shape), *last]


def cell(call: Call, book: LabelBook) -> Result:
    """Couple the gates of each hidden unit of a single step."""
    names = ("w_ih", "w_hh", "b_ih", "b_hh")
    weights = [call[name] for name in names if call.get(name) is not None]
    if not all(isinstance(p, Weight) for p in weights):
        return pin_layer(call, book, COMPUTED)
    hidden_H, _ = _cell(book, book.labels_of(call["input"]), weights)
    state = call["hx"]
    for initial in state if isinstance(state, list) else [state]:
        join([hidden_H, book.labels_of(initial)], call.shape, book)
    results = [hidden_H.expand(shape) for shape in call.shapes]
    return results if call.gives_list else results[0]


def _cell(book: LabelBook, labels: Labels, weights: Sequence[Weight]) -> tuple[Labels, Labels]:
    """Couple one cell's weights; return the labels of its hidden units and of its output."""
    input_weight, hidden_weight, *rest = weights
    projection = rest.pop() if rest and len(rest[-1].shape) == 2 else None
    book.consume(input_weight, (1,), channels_first(labels, -1))
    if projection is None:
        hidden_H = output_P = book.axis(hidden_weight, 1)
    else:
        hidden_H, output_P = book.axis(projection, 1), book.produce(projection, 0)
        book.consume(hidden_weight, (1,), output_P[:, None])
    for weight in (input_weight, hidden_weight, *rest):
        book.equate(book.produce(weight, 0).view(-1, len(hidden_H)), hidden_H)
    return hidden_H, output_P


RULES: dict[str, Rule] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed_convolution
    ),
    **dict.fromkeys(("batch_norm", "instance_norm"), batch_norm),
    "group_norm": group_norm,
    **dict.fromkeys(("layer_norm", "rms_norm", "local_response_norm"), norm_over_channels),
    **dict.fromkeys(("embedding", "embedding_bag"), embedding),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), cell),
}
