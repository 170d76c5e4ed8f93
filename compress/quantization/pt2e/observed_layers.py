"""Weights, biases and weight observers of the layers of a prepared graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.quantization.pt2e.graph_capture import readers_of, replace_value_, value_of
from compress.quantization.pt2e.observer_ranges import observer_of
from compress.quantization.pt2e.quantizer import WEIGHTED, is_constant

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule, Node


def layers_of(prepared: GraphModule) -> list[Node]:
    """Return the convolutions and linear layers whose weight and bias no other node reads."""

    def is_unshared(operand: Any) -> bool:
        constant = skip_observers(operand)
        return not is_constant(constant) or len(readers_of(prepared, constant)) == 1

    return [
        node
        for node in prepared.graph.nodes
        if node.target in WEIGHTED
        if is_constant(skip_observers(node.args[1]))
        if all(map(is_unshared, node.args[1:3]))
    ]


def skip_observers(operand: Any) -> Any:
    """Return the node that an operand observes, through any number of observers."""
    while getattr(operand, "op", None) == "call_module":
        operand = operand.args[0]
    return operand


def weight_observer_of(prepared: GraphModule, layer: Node) -> Any:
    """Return the observer of a layer's weight."""
    return observer_of(prepared, layer.args[1])


def weight_of(prepared: GraphModule, layer: Node) -> torch.Tensor:
    """Return a layer's weight."""
    return value_of(prepared, skip_observers(layer.args[1]))


def bias_of(prepared: GraphModule, layer: Node) -> torch.Tensor | None:
    """Return a layer's bias, or None."""
    bias = skip_observers(layer.args[2]) if len(layer.args) > 2 else None
    return value_of(prepared, bias) if is_constant(bias) else None


def set_weight_(prepared: GraphModule, layer: Node, weight: torch.Tensor) -> None:
    """Replace a layer's weight."""
    replace_value_(prepared, skip_observers(layer.args[1]), weight)


def set_bias_(prepared: GraphModule, layer: Node, bias_O: torch.Tensor) -> None:
    """Replace the bias of a layer that has one."""
    replace_value_(prepared, skip_observers(layer.args[2]), bias_O)
