"""Rules for the operators that hold weights or contract over channels."""

from __future__ import annotations

import torch

from compress.pruning.elementwise import join
from compress.pruning.labels import LabelBook, Labels, Weight, channels_first
from compress.pruning.operators import Call, Result, Rule, leave_alone, pin_all

COMPUTED = "its weight is computed from others, as weight_norm and other parametrizations do"


def convolution(call: Call, book: LabelBook) -> Result:
    """Read the weight's second axis and make its first; a depthwise one passes channels on."""
    weight = call["weight"]
    if not isinstance(weight, Weight):
        return leave_alone(call, book, COMPUTED)
    axis = len(call.shape) - len(weight.shape) + 1
    input_CX = channels_first(book.of(call["input"]), axis)
    output_O = book.rows(weight, 0)
    groups: int = call["groups"]
    if groups > 1 and weight.shape[1] == 1:
        book.equate(input_CX[:, None], output_O.view(groups, -1, 1))
    else:
        # The weight has one set of columns for all groups: the same places leave each of them.
        book.consume(weight, 1, input_CX.view(groups, weight.shape[1], -1).transpose(0, 1))
        book.equate(output_O.view(groups, -1), output_O.view(groups, -1)[:1])
    book.follow(call["bias"], output_O)
    return _along(output_O, axis, call.shape)


def transposed_convolution(call: Call, book: LabelBook) -> Result:
    """Read the weight's first axis and make its second."""
    weight = call["weight"]
    if not isinstance(weight, Weight):
        return leave_alone(call, book, COMPUTED)
    if call["groups"] > 1:
        return leave_alone(call, book, "a transposed convolution in groups")
    axis = len(call.shape) - len(weight.shape) + 1
    book.consume(weight, 0, channels_first(book.of(call["input"]), axis))
    output_O = book.rows(weight, 1)
    book.follow(call["bias"], output_O)
    return _along(output_O, axis, call.shape)


def linear(call: Call, book: LabelBook) -> Result:
    """Read the weight's second axis and make its first."""
    return _project(call, book, call["input"], call["weight"], call["bias"], (0, 1))


def addmm(call: Call, book: LabelBook) -> Result:
    """Do as a linear layer whose weight lies the other way round."""
    return _project(call, book, call["mat1"], call["mat2"], call["self"], (1, 0))


def matmul(call: Call, book: LabelBook) -> Result:
    """Do as a linear layer on a weight; between activations keep each product's operands whole."""
    left = call["self"]
    right = call["other"] if call.operator == "matmul" else call["mat2"]
    if isinstance(right, Weight) and len(right.shape) == 2 and not isinstance(left, Weight):
        return _project(call, book, left, right, None, (1, 0))
    left, right = book.of(left), book.of(right)
    if left.dim() < 2 or right.dim() < 2:
        return pin_all(call, book, "a product with a vector")
    book.equate(left, left[..., :1])
    book.equate(right, right[..., :1, :])
    left, right = (side.expand(call.shape) for side in (left[..., :1], right[..., :1, :]))
    book.equate(left, right)
    return right


def attention(call: Call, book: LabelBook) -> Result:
    """Keep heads whole: all that meets in one head, its group's keys and values included."""
    query, key, value = (book.of(call[name]) for name in ("query", "key", "value"))
    if query.dim() != 4:
        return pin_all(call, book, "attention without an axis for heads")
    if key.shape[1] != query.shape[1]:
        shared = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
    head_BH11 = query[..., :1, :1]
    for part in (query, key, value):
        book.equate(part, head_BH11)
    if call["attn_mask"] is not None:
        scores = (*query.shape[:-1], key.shape[-2])
        join([head_BH11.expand(scores), book.of(call["attn_mask"])], scores, book)
    return head_BH11.expand(call.shape)


def batch_norm(call: Call, book: LabelBook) -> Result:
    """Pass channels on; scale, shift and statistics go with them."""
    labels = book.of(call["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        if call[name] is not None:
            book.follow(call[name], channels_first(labels, 1).T)
    return labels


def norm_over_channels(call: Call, book: LabelBook) -> Result:
    """Pin: statistics over channels change when one of them leaves."""
    labels = book.of(call["input"])
    book.pin(labels, f"{call.operator} takes statistics over its channels")
    return labels


def embedding(call: Call, book: LabelBook) -> Result:
    """Make the weight's second axis."""
    weight = call["weight"]
    if not isinstance(weight, Weight):
        return leave_alone(call, book, COMPUTED)
    return book.rows(weight, 1).expand(call.shape)


def recurrent(call: Call, book: LabelBook) -> Result:
    """Tie the gates of each hidden unit, over all layers; several directions are pinned."""
    parameters = call.get("params")
    state = call.get("hx")
    if parameters is None or call["bidirectional"]:
        return leave_alone(call, book, f"{call.operator} packed or in two directions")
    if len(parameters) % call["num_layers"] or not all(isinstance(p, Weight) for p in parameters):
        return leave_alone(call, book, COMPUTED)
    per_layer = len(parameters) // call["num_layers"]
    labels, hidden = book.of(call["input"]), []
    for first in range(0, len(parameters), per_layer):
        input_weight, hidden_weight, *biases = parameters[first : first + per_layer]
        if any(len(bias.shape) != 1 for bias in biases):
            return leave_alone(call, book, f"{call.operator} with a projection")
        book.consume(input_weight, 1, channels_first(labels, -1))
        hidden_H = book.axis(hidden_weight, 1)
        for weight in (input_weight, hidden_weight, *biases):
            book.equate(book.rows(weight, 0).view(-1, len(hidden_H)), hidden_H)
        hidden.append(hidden_H)
        book.equate(hidden_H, hidden[0])  # all layers of one module are equally wide
        labels = hidden_H.expand(*call.shape[:-1], len(hidden_H))
    last = torch.stack(hidden)[:, None].expand(call.shapes[1])
    for given in state if isinstance(state, list | tuple) else [state]:
        join([last, book.of(given)], tuple(last.shape), book)
    return [labels, *(last for _ in call.shapes[1:])]


def _project(
    call: Call,
    book: LabelBook,
    features: Labels | Weight,
    weight: Labels | Weight,
    bias: Labels | Weight | None,
    axes: tuple[int, int],
) -> Result:
    if not isinstance(weight, Weight):
        return leave_alone(call, book, COMPUTED)
    output_axis, input_axis = axes
    book.consume(weight, input_axis, channels_first(book.of(features), -1))
    output_O = book.rows(weight, output_axis)
    book.follow(bias, output_O)
    return output_O.expand(call.shape)


def _along(labels: Labels, axis: int, shape: tuple[int, ...]) -> Labels:
    return labels.view(-1, *[1] * (len(shape) - axis - 1)).expand(shape)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), transposed_convolution
    ),
    "linear": linear,
    "addmm": addmm,
    **dict.fromkeys(("matmul", "mm", "bmm"), matmul),
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(("batch_norm", "instance_norm"), batch_norm),
    **dict.fromkeys(("layer_norm", "rms_norm", "group_norm"), norm_over_channels),
    "embedding": embedding,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
}
