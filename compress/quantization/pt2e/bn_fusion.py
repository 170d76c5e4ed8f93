"""Keep torchao from folding a BatchNorm where that fails, or would change the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from compress.quantization.pt2e.quantizer import WEIGHTED, is_constant

if TYPE_CHECKING:
    from torch.fx import GraphModule

aten = torch.ops.aten
BATCH_NORM = aten._native_batch_norm_legit_no_training.default
FOLDABLE = {
    *WEIGHTED,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
}
"""Operators into which torchao folds the BatchNorm that follows."""


def protect_shared_layers_(graph: GraphModule) -> None:
    """Insert a copy between a layer and a BatchNorm that must not be folded into it.

    torchao 0.18 folds every BatchNorm that follows a layer. Where the layer's output has another
    reader too, or another BatchNorm follows the same weight, that would change the model. It fails
    for computed weights, and of grouped transposed convolutions it takes the wrong axis.
    """
    for node in graph.graph.nodes:
        layer = node.args[0] if node.target is BATCH_NORM else None
        if not (isinstance(layer, Node) and layer.target in FOLDABLE):
            continue
        weight = layer.args[1]
        layers = weight.users if isinstance(weight, Node) else [layer]
        readers = [reader for each in layers for reader in each.users]
        equal = [r.target is BATCH_NORM and r.args[1:] == node.args[1:] for r in readers]
        tensors = [part for part in (*layer.args[1:3], *node.args[1:5]) if isinstance(part, Node)]
        is_alone = all(equal) and all(len(each.users) == 1 for each in layers)
        if is_alone and all(map(is_constant, tensors)) and not _is_grouped_transpose(layer):
            continue
        with graph.graph.inserting_before(node):
            copy = graph.graph.call_function(aten.clone.default, (layer,))
            copy.meta = dict(layer.meta)
        node.replace_input_with(layer, copy)
    graph.recompile()


def _is_grouped_transpose(layer: Node) -> bool:
    groups = layer.args[6] if len(layer.args) > 6 else layer.kwargs.get("groups", 1)
    return layer.target not in WEIGHTED and bool(groups != 1)
