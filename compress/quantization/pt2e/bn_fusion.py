"""Keep torchao from folding a BatchNorm where that would change the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from compress.quantization.pt2e.quantizer import WEIGHTED

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
    reader too, or another BatchNorm follows the same weight, that would change the model.
    """
    for node in graph.graph.nodes:
        layer = node.args[0] if node.target is BATCH_NORM else None
        if not (isinstance(layer, Node) and layer.target in FOLDABLE) or _can_fold(layer, node):
            continue
        with graph.graph.inserting_before(node):
            copy = graph.graph.call_function(aten.clone.default, (layer,))
            copy.meta = dict(layer.meta)
        node.replace_input_with(layer, copy)
    graph.recompile()


def _can_fold(layer: Node, norm: Node) -> bool:
    """Whether equal BatchNorms are the only readers of every layer that uses this weight."""
    weight = layer.args[1]
    layers = list(weight.users) if isinstance(weight, Node) else [layer]
    followers = [list(each.users) for each in layers]
    return all(
        len(readers) == 1
        and readers[0].target is BATCH_NORM
        and readers[0].args[1:] == norm.args[1:]
        for readers in followers
    )
