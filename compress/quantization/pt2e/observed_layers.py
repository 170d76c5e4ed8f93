"""Layers with weights in a prepared graph, whose operands are read through observers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress.quantization.pt2e.graph_constants import readers_of, replace_value_, value_of
from compress.quantization.pt2e.observer_ranges import observer_of
from compress.quantization.pt2e.quantizer import WEIGHTED, is_constant

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule, Node


def layers_of(prepared: GraphModule) -> list[Node]:
    """Return the convolutions and linear layers that own their weight and bias, in graph order."""
    return [
        node
        for node in prepared.graph.nodes
        if node.target in WEIGHTED
        if is_constant(behind(node.args[1]))
        if all(_is_owned(prepared, operand) for operand in node.args[1:3])
    ]


def is_rounded(layer: Node) -> bool:
    """Whether a layer is going to be computed in integers."""
    return all(operand.op == "call_module" for operand in layer.args[:2])  # type: ignore[union-attr]


def behind(operand: Any) -> Any:
    """Return what an operand is before observers."""
    while getattr(operand, "op", None) == "call_module":
        operand = operand.args[0]
    return operand


def weight_observer_of(prepared: GraphModule, layer: Node) -> Any:
    """Return the observer that a layer's weight is read through."""
    return observer_of(prepared, layer.args[1])


def weight_of(prepared: GraphModule, layer: Node) -> torch.Tensor:
    """Return a layer's weight."""
    return value_of(prepared, behind(layer.args[1]))


def bias_of(prepared: GraphModule, layer: Node) -> torch.Tensor | None:
    """Return a layer's bias, if it has one."""
    bias = behind(layer.args[2]) if len(layer.args) > 2 else None
    return value_of(prepared, bias) if is_constant(bias) else None


def put_weight_(prepared: GraphModule, layer: Node, weight: torch.Tensor) -> None:
    """Give a layer another weight, in place."""
    replace_value_(prepared, behind(layer.args[1]), weight)


def put_bias_(prepared: GraphModule, layer: Node, bias_O: torch.Tensor) -> None:
    """Give a layer that has a bias another one, in place."""
    replace_value_(prepared, behind(layer.args[2]), bias_O)


def _is_owned(prepared: GraphModule, operand: Any) -> bool:
    constant = behind(operand)
    return not is_constant(constant) or len(readers_of(prepared, constant)) == 1
