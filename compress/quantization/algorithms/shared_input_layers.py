"""Groups of linear layers that read one tensor, and rescaling of that tensor's channels.

SmoothQuant and AWQ divide the channels of an activation and multiply the weights that read it. All
readers must be scaled alike; the division is absorbed by the operator before, where it can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from compress.quantization.pt2e.graph_capture import (
    is_excluded,
    module_of,
    readers_of,
    replace_value_,
    value_of,
)
from compress.quantization.pt2e.quantizer import LINEAR, is_constant, is_float

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import GraphModule, Node

aten = torch.ops.aten
NORMS = {aten.layer_norm.default: (2, 3), aten.rms_norm.default: (2,)}
"""Operator → argument indices of its weight and bias."""
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
ATTENTION = aten.scaled_dot_product_attention.default
HEADS_MERGED = (VIEWS, {aten.transpose.int}, {ATTENTION}, {aten.transpose.int}, VIEWS, {LINEAR})
"""Operators from attention's merged output back to the layer that computes its values."""


@dataclass(frozen=True)
class SharedInputGroup:
    """Linear layers and the tensor that all of them read."""

    source: Node
    linears: tuple[Node, ...]

    @property
    def name(self) -> str:
        """Module of the first layer."""
        return module_of(self.linears[0]) or self.linears[0].name

    def weight_OI(self, graph: GraphModule) -> torch.Tensor:  # noqa: N802 - the letters name the axes
        """Return the layers' weights, concatenated over their outputs."""
        return torch.cat([value_of(graph, cast("Node", linear.args[1])) for linear in self.linears])

    def absorbers(self, graph: GraphModule) -> list[Node]:
        """Return the constants whose scaling scales the input; empty where others read it too."""
        if set(self.source.users) - set(self.linears):
            return []
        constants = _scaling_constants(self.source)
        return constants if all(len(readers_of(graph, c)) == 1 for c in constants) else []

    def divide_input_(self, graph: GraphModule, scale_I: torch.Tensor) -> set[str]:
        """Divide the input channel by channel, and multiply the weights; outputs stay the same.

        Returns:
            Modules before it that absorbed the division: their outputs now have other scales.
        """
        for linear in self.linears:
            weight = cast("Node", linear.args[1])
            replace_value_(graph, weight, value_of(graph, weight) * scale_I)
        absorbers = self.absorbers(graph)
        for constant in absorbers:
            value = value_of(graph, constant)
            replace_value_(graph, constant, value / scale_I.view(-1, *[1] * (value.dim() - 1)))
        if absorbers:
            producers = [reader for constant in absorbers for reader in readers_of(graph, constant)]
            return {module_of(producer) for producer in producers if module_of(producer)}
        name, factor_I = f"{self.linears[0].name}_smoothing", 1 / scale_I
        graph.register_buffer(name, factor_I)
        with graph.graph.inserting_after(self.source):
            factor = graph.graph.get_attr(name)
        with graph.graph.inserting_after(factor):
            product = graph.graph.call_function(aten.mul.Tensor, (self.source, factor))
        factor.meta["val"] = factor_I
        # A part of the first layer: `exclude` and messages name it so.
        product.meta |= {k: v for k, v in self.linears[0].meta.items() if k == "nn_module_stack"}
        product.meta["val"] = self.source.meta["val"]
        for linear in self.linears:
            linear.replace_input_with(self.source, product)
        return set()


def shared_input_groups(graph: GraphModule, exclude: Sequence[str] = ()) -> list[SharedInputGroup]:
    """Group the linear layers of a graph by the float tensor that they read, in graph order.

    Left out are modules that match `exclude`, and layers that share a weight with another operator.
    """
    groups: dict[Node, list[Node]] = {}
    for node in graph.graph.nodes:
        if node.target is LINEAR and is_float(node.args[0]) and is_constant(node.args[1]):
            unshared = len(readers_of(graph, node.args[1])) == 1
            if unshared and is_float(node.args[1]) and not is_excluded(node, exclude):
                groups.setdefault(node.args[0], []).append(node)
    return [SharedInputGroup(source, tuple(linears)) for source, linears in groups.items()]


def bypass_copies_(graph: GraphModule) -> None:
    """Make readers of a copy, or of a view of the same shape, read the original.

    In a graph without in-place writes they are equal. Tracing leaves a copy where a dropout was.
    """

    def shape(node: Node) -> list[str]:
        # As text: comparing symbolic sizes would add guards that fix them.
        return [str(size) for size in node.meta["val"].shape]

    for node in list(graph.graph.nodes):
        is_copy = node.target is aten.clone.default or node.target in VIEWS
        original: Any = node.args[0] if is_copy and not node.kwargs else None
        if original and original.op == "call_function" and shape(original) == shape(node):
            node.replace_all_uses_with(original)
            graph.graph.erase_node(node)
    graph.recompile()


def _scaling_constants(node: Node) -> list[Node]:
    """Return the constants whose scaling scales a tensor's channels; empty where there are none."""
    if node.target is aten.mul.Tensor:
        constants = [a for a in node.args if is_constant(a) and a.meta["val"].dim() == 1]
        return [c for c in constants if len(c.meta["val"]) == node.meta["val"].shape[-1]][:1]
    if node.target in NORMS:
        operands = [node.args[index] for index in NORMS[node.target] if len(node.args) > index]
        per_channel = len(node.args[1]) == 1  # type: ignore[arg-type]  # normalized_shape
        return _if_all_constant(operands) if per_channel else []
    layer: Any = _value_projection(node) or node
    if layer.target is aten.relu.default and len(layer.args[0].users) == 1:
        layer = layer.args[0]
    return _if_all_constant(layer.args[1:]) if layer.target is LINEAR else []


def _if_all_constant(operands: Sequence[Any]) -> list[Node]:
    """Return a weight and perhaps a bias, or nothing where one of them is computed."""
    present = [operand for operand in operands if operand is not None]
    return present if all(map(is_constant, present)) else []


def _value_projection(merged: Node) -> Any:
    """Return the layer that computes an attention's values, whose channels its output has."""
    chain: list[Any] = [merged]
    for targets in HEADS_MERGED:
        node = chain[-1]
        is_transpose = node.target is aten.transpose.int
        if node.target not in targets or (is_transpose and node.args[1:] != (1, 2)):
            return None
        chain.append(node.args[2 if node.target is ATTENTION else 0])
    _, _, attention, values, split, layer, _ = chain
    _, heads, _, size = attention.meta["val"].shape
    same_heads = values.meta["val"].shape[1] == heads
    same_heads &= split.meta["val"].shape[2:] == (heads, size)
    all_merged = merged.meta["val"].dim() == 3 and merged.meta["val"].shape[-1] == heads * size
    unshared = all(len(node.users) == 1 for node in chain[1:-1])
    return layer if same_heads and all_merged and unshared else None
