"""Which BatchNorms can be folded into the layer before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from compress.quantization.pt2e.quantizer import WEIGHTED

if TYPE_CHECKING:
    from torch.fx import GraphModule

aten = torch.ops.aten
BATCH_NORM = aten._native_batch_norm_legit_no_training.default
TRANSPOSED = {
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
}
FOLDING = {*WEIGHTED, *TRANSPOSED}


def part_from_layers_read_elsewhere_(graph: GraphModule) -> None:
    """Put a copy before each BatchNorm that must not be folded, in place.

    torchao 0.18 folds whatever BatchNorm follows a layer. Where something else reads the layer's
    result too, or another BatchNorm follows its weight, that would change the model.
    """
    for node in graph.graph.nodes:
        layer = _layer_before(node)
        if layer is not None and not _folds(layer, node):
            with graph.graph.inserting_before(node):
                copy = graph.graph.call_function(aten.clone.default, (layer,))
                copy.meta = dict(layer.meta)
            node.replace_input_with(layer, copy)
    graph.recompile()


def _layer_before(node: Node) -> Node | None:
    """Return the layer that a BatchNorm follows."""
    source = node.args[0] if node.target is BATCH_NORM else None
    return source if isinstance(source, Node) and source.target in FOLDING else None


def _folds(layer: Node, norm: Node) -> bool:
    """Whether one BatchNorm alone follows a layer, wherever its weight is used."""
    weight = layer.args[1]
    layers = list(weight.users) if isinstance(weight, Node) else [layer]
    followers = [list(each.users) for each in layers]
    return all(
        len(readers) == 1
        and readers[0].target is BATCH_NORM
        and readers[0].args[1:] == norm.args[1:]
        for readers in followers
    )
