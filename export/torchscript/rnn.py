"""Recurrent layers with rounded weights, turned into torch's own LSTM and GRU of integers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import fx

    from export.torchscript.quantized_kernels import Lowering

aten = torch.ops.aten
kernels = torch.ops.quantized


def lower_recurrence_(node: fx.Node, lowering: Lowering) -> None:
    """Let a layer multiply its integer weights, inputs and states rounded in each step, in place.

    Layers whose weights are floats, or that project their states, stay what they are.
    """
    source, states, weights, has_biases, layers, dropout, training, both_ways, batch_first = (
        node.args
    )
    directions = int(layers) * (2 if both_ways else 1)  # type: ignore[arg-type]  # a number
    held: list[Any] = list(weights)  # type: ignore[arg-type]  # a list
    width = 4 if has_biases else 2
    rounded = [lowering.is_rounded(part) for part in held if part.meta["val"].dim() == 2]
    if len(held) != directions * width or not all(rounded):
        return
    cells = []
    with lowering.inserting_before(node):
        for start in range(0, len(held), width):
            cells.append(lowering.held(_cell(held[start : start + width], lowering)))
        arguments = (source, states, cells, True, layers, dropout, training, both_ways, batch_first)
        if node.target is aten.lstm.input:
            rounding = {"dtype": torch.qint8, "use_dynamic": True}
            made = lowering.call(aten.quantized_lstm.input, arguments, rounding)
        else:
            made = lowering.call(aten.quantized_gru.input, arguments)
    node.replace_all_uses_with(made)
    lowering.graph.graph.erase_node(node)  # it may draw random numbers, so it is never dead code


def _cell(parts: list[Any], lowering: Lowering) -> Any:
    """Return the weights of one layer and direction, as torch's kernels hold them."""
    matrices = [lowering.quantized_weight(part) for part in parts[:2]]
    biases = [lowering.value(part).detach() for part in parts[2:]] or [
        torch.zeros(len(matrix)) for matrix in matrices
    ]
    packed = [kernels.linear_prepack(w, b) for w, b in zip(matrices, biases, strict=True)]
    return kernels.make_quantized_cell_params_dynamic(*packed, *biases, False)
