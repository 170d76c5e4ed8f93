"""Layers that the `exclude` of a quantization stage can leave in float one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.quantization.mixed_precision.bit_candidates import layer_name
from compress.quantization.pt2e.graph_capture import capture, is_excluded, value_of
from compress.quantization.pt2e.quantizer import (
    ADDITION,
    AVERAGE_POOL,
    EMBEDDING,
    MOVES,
    WEIGHTED,
    is_constant,
    protect_shared_layers_,
)
from compress.quantization.pt2e.torchao_api import fuse_conv_bn_

if TYPE_CHECKING:
    import torch
    from torch import nn

    from compress.common.signature import Signature

WILDCARDS = set("*?[")
QUANTIZED_TOO = {ADDITION, AVERAGE_POOL, EMBEDDING, *MOVES}


@dataclass(frozen=True)
class WeightedLayer:
    """A convolution or a linear layer."""

    name: str | None
    """Its module; None where `exclude` cannot name the layer alone, as it belongs to no module, or
    to one in which something else is quantized too."""
    weight: torch.Tensor
    """With the BatchNorm after it folded in, outputs first."""


def weighted_layers(module: nn.Module, signature: Signature) -> list[WeightedLayer]:
    """Return the convolutions and linear layers in graph order; those called twice are in twice."""
    graph = capture(module, signature)
    modules = {name for name, _ in module.named_modules()}
    protect_shared_layers_(graph)
    fuse_conv_bn_(graph)
    layers = []
    for layer in graph.graph.nodes:
        if layer.target not in WEIGHTED or not is_constant(layer.args[1]):
            continue
        name = layer_name(layer)
        excluded = [node for node in graph.graph.nodes if is_excluded(node, (name,))]
        alone = all(
            node.target not in QUANTIZED_TOO
            and (node.target not in WEIGHTED or layer_name(node) == name)
            for node in excluded
        )
        is_named = name in modules and not WILDCARDS & set(name)
        weight = value_of(graph, layer.args[1]).detach()
        layers.append(WeightedLayer(name if is_named and alone else None, weight))
    return layers
