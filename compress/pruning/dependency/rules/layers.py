"""Rules for layers: convolutions, normalisations, embeddings, recurrent ones and products.

A product that sums over an axis (linear layers, matrix products, einsum, attention) is treated as
an einsum of two operands. A letter that both have and the result lacks is *summed*; a weight
*outputs* channels along the letters that it alone adds to the result.

Statistics over channels, such as LayerNorm's mean, change when a channel is removed. They pin the
channels, unless ``LabelBook.across_norms`` is set. Then the calls are recorded, and the smaller
model takes the statistics over the channels that stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

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
from compress.pruning.dependency.rules.op_call import (
    COMPUTED,
    Call,
    Result,
    Rule,
    pin_all,
    pin_layer,
)


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


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Operand(NamedTuple):
    """One side of a product, with a letter for each of its axes."""

    value: Labels | Weight
    letters: str


def matmul(call: Call, book: LabelBook) -> Result:
    """Product of matrices, perhaps in batches."""
    left = call["self"]
    right = next(
        call[name] for name in ("other", "mat2", "vec", "tensor") if name in call.arguments
    )
    return _batched(call, book, left, right)


def baddbmm(call: Call, book: LabelBook) -> Result:
    """Product of matrices in batches, plus a tensor."""
    product = _batched(call, book, call["batch1"], call["batch2"])
    return join([book.labels_of(call["self"]), product], call.shape, book)


def einsum(call: Call, book: LabelBook) -> Result:
    """Contract operands pairwise from the left; pin everything if there is only one."""
    inputs, arrow, output = call["equation"].replace(" ", "").partition("->")
    parts, tensors = inputs.split(","), call["tensors"]
    letters = [part.replace(".", "") for part in parts]
    if len(parts) < 2 or not arrow or any(len(set(p)) < len(p) for p in letters):
        return pin_all(call, book, f"an einsum {call['equation']!r}, which is not followed")
    free = "".join(letter for letter in LETTERS if letter not in inputs)

    def spelt(part: str, axes: int) -> str:
        dots = axes - len(part) + 3
        return part.replace("...", free[:dots][::-1])  # batches are aligned at their ends

    left, *rest = (Operand(t, spelt(p, len(t.shape))) for t, p in zip(tensors, parts, strict=True))
    output = spelt(output, len(call.shape))
    for place, right in enumerate(rest):
        needed = output + "".join(later.letters for later in rest[place + 1 :])
        both = "".join(dict.fromkeys(left.letters + right.letters))
        kept = "".join(x for x in both if x in needed) if rest[place + 1 :] else output
        left = Operand(contract(call, book, left, right, kept), kept)
    return book.labels_of(left.value)


def bilinear(call: Call, book: LabelBook) -> Result:
    """Read the weight's second and third axes and output its first."""
    weight = call["weight"]
    if not isinstance(weight, Weight):
        return pin_layer(call, book, COMPUTED)
    for axis, name in ((1, "input1"), (2, "input2")):
        labels = book.labels_of(call[name])
        book.consume(weight, (axis,), _channels(labels, [labels.dim() - 1]))
    output_O = book.produce(weight, 0)
    book.tie(call["bias"], output_O)
    return output_O.expand(call.shape)


def attention(call: Call, book: LabelBook) -> Result:
    """Couple all channels of one head, with the keys and values of its group of heads."""
    query, key, value = (book.labels_of(call[name]) for name in ("query", "key", "value"))
    if query.dim() != 4:
        # Values may become narrower, queries and keys not.
        for part in (query, key):
            book.pin(part, "it is scaled by the number of its channels")
        if call["attn_mask"] is not None:
            book.pin(book.labels_of(call["attn_mask"]), "attention without an axis for heads")
        return value[..., :1, :].expand(call.shape)
    if key.shape[1] != query.shape[1]:
        shared = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
    has_heads = varies(query, 1)
    head_BH11 = query[..., :1, :1]
    for part in (query, key, value):
        if has_heads and not varies(part, 1):
            book.pin(part, "all heads share it")
        else:
            book.equate(part, head_BH11)
    if call["attn_mask"] is not None:
        scores = (*query.shape[:-1], key.shape[-2])
        join([head_BH11.expand(scores), book.labels_of(call["attn_mask"])], scores, book)
    return head_BH11.expand(call.shape)


def contract(call: Call, book: LabelBook, left: Operand, right: Operand, output: str) -> Labels:
    """Propagate labels through a product of two operands that is summed over some letters."""
    weights = [
        side
        for side in (left, right)
        if isinstance(side.value, Weight) and not side.value.is_constant
    ]
    if len(weights) == 2:
        pin_layer(call, book, COMPUTED)
        return torch.tensor(book.pinned_label(COMPUTED)).expand(_shape(left, right, output))
    if not set(left.letters) & set(right.letters) - set(output):
        sides = [
            _aligned(book.labels_of(side.value), side.letters, output) for side in (left, right)
        ]
        return join(sides, _shape(left, right, output), book)
    if weights:
        features = right if weights[0] is left else left
        return _with_weight(book, features, weights[0], output)
    return _of_activations(book, left, right, output)


def linear(call: Call, book: LabelBook, names: tuple[str, str, str], letters: str) -> Result:
    """Read one axis of the weight and output the other; ``letters`` says which (c is read)."""
    features, weight, bias = (call[name] for name in names)
    if not isinstance(weight, Weight):
        return pin_layer(call, book, COMPUTED)
    # From the end, because `c` and `o` are the weight's.
    batch = LETTERS[-len(features.shape) + 1 :] if len(features.shape) > 1 else ""
    left, right = Operand(book.labels_of(features), f"{batch}c"), Operand(weight, letters)
    labels = _with_weight(book, left, right, f"{batch}o")
    if bias is not None and varies(labels, labels.dim() - 1):
        book.tie(bias, _channels(labels, [labels.dim() - 1]).T)
    return labels


def _batched(call: Call, book: LabelBook, left: Labels | Weight, right: Labels | Weight) -> Labels:
    # `a`, `b` and `c` are the row, the summed axis and the column.
    batch = LETTERS[3 : 3 + len(call.shape)]
    row, column = "a" * (len(left.shape) > 1), "c" * (len(right.shape) > 1)
    batch = batch[: len(call.shape) - len(row) - len(column)]
    own = [batch[len(batch) - max(len(x.shape) - 2, 0) :] for x in (left, right)]
    return contract(
        call,
        book,
        Operand(left, f"{own[0]}{row}b"),
        Operand(right, f"{own[1]}b{column}"),
        f"{batch}{row}{column}",
    )


def _with_weight(book: LabelBook, features: Operand, side: Operand, output: str) -> Labels:
    """Multiply an activation by a weight: some axes are read, some output, others pass."""
    assert isinstance(side.value, Weight)
    weight, labels = side.value, book.labels_of(features.value)
    summed = [x for x in side.letters if x in features.letters and x not in output]
    produced = [x for x in side.letters if x not in features.letters and x in output]
    rest = [x for x in features.letters if x not in summed]
    places = {x: i for i, x in enumerate(features.letters)}
    shape = _shape(features, side, output)
    is_mixed = not any(varies(labels, places[x]) for x in summed)
    if is_mixed and any(varies(labels, places[x]) for x in rest) and not book.is_pinned(labels):
        # The weight mixes positions, not channels: those pass, and the weight is not sliced.
        labels = _narrowed(labels, [places[x] for x in summed])
        return _aligned(labels, features.letters, output).expand(shape)
    if any(varies(labels, places[x]) for x in rest if x in side.letters):
        book.pin(labels, "each of them has a weight of its own")
    columns = tuple(side.letters.index(x) for x in summed)
    book.consume(weight, columns, _channels(labels, [places[x] for x in summed]))
    if not produced:
        return torch.tensor(WILD).expand(shape)
    rows = book.produce(weight, *(side.letters.index(x) for x in produced))
    return _aligned(rows, "".join(produced), output).expand(shape)


def _of_activations(book: LabelBook, left: Operand, right: Operand, output: str) -> Labels:
    """Multiply two activations; what is summed together can only be removed together."""
    summed = "".join(x for x in left.letters if x in right.letters and x not in output)
    shape = _shape(left, right, output)
    sides, unsummed = [], []
    for value, letters in (left, right):
        labels = book.labels_of(value)
        alone = [i for i, x in enumerate(letters) if x not in summed]
        unsummed += [varies(labels, i) for i in alone]
        sides.append((labels, letters, alone))
    if not any(unsummed):
        # Without heads: channels meet pairwise and are summed up, so none is output.
        book.equate(*(_aligned(_narrowed(x, alone), own, summed) for x, own, alone in sides))
        return torch.tensor(WILD).expand(shape)
    heads = []
    for labels, letters, _ in sides:
        one_entry = _narrowed(labels, [i for i, x in enumerate(letters) if x not in output])
        book.equate(labels, one_entry)
        heads.append(_aligned(one_entry, letters, output))
    along = [{i for i in range(x.dim()) if varies(x, i)} for x in heads]
    if not all(along):  # one side has no channels
        return heads[0 if along[0] else 1].expand(shape)
    if along[0].isdisjoint(along[1]):
        shared = {i for i, x in enumerate(output) if x in left.letters and x in right.letters}
        for side in (0, 1):
            if along[side] & shared:
                book.pin(heads[1 - side], "all heads share it")
                return heads[side].expand(shape)
    book.equate(*heads)
    return heads[1].expand(shape)


def _shape(left: Operand, right: Operand, output: str) -> list[int]:
    sizes: dict[str, int] = {}
    for value, letters in (left, right):
        for letter, size in zip(letters, value.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    return [sizes[letter] for letter in output]


def _narrowed(labels: Labels, axes: Iterable[int]) -> Labels:
    for axis in axes:
        labels = labels.narrow(axis, 0, 1)
    return labels


def _aligned(labels: Labels, letters: str, output: str) -> Labels:
    """Permute labels to the axes of a result; axes that they lack have size 1."""
    order = [letters.index(x) for x in output if x in letters]
    dropped = [i for i in range(labels.dim()) if i not in order]
    kept = _narrowed(labels, dropped).permute(*order, *dropped)
    sizes = [labels.shape[letters.index(x)] if x in letters else 1 for x in output]
    return kept.reshape(sizes)


def _channels(labels: Labels, axes: Sequence[int]) -> Labels:
    """Move some axes first and flatten all others along which labels vary into one."""
    others = [i for i in range(labels.dim()) if i not in axes]
    labels = _narrowed(labels, [i for i in others if not varies(labels, i)])
    moved = labels.permute(*axes, *others)
    return moved.reshape(*moved.shape[: len(axes)], -1)


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
    "linear": partial(linear, names=("input", "weight", "bias"), letters="oc"),
    "addmm": partial(linear, names=("mat1", "mat2", "self"), letters="co"),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), matmul),
    "baddbmm": baddbmm,
    "einsum": einsum,
    "bilinear": bilinear,
    "scaled_dot_product_attention": attention,
}
