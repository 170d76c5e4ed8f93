"""Rules for recurrent layers: the gates of one hidden unit can only be removed together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.pruning.dependency.rules.channel_labels import (
    LabelBook,
    Labels,
    Weight,
    channels_first,
)
from compress.pruning.dependency.rules.elementwise import join
from compress.pruning.dependency.rules.op_call import COMPUTED, Call, Result, Rule, pin_layer

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), cell),
}
