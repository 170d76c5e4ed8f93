"""Linear layers that read one tensor: what scales its channels must be undone in all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from compress.quantization.pt2e.graph_constants import readers_of, replace_value_, value_of
from compress.quantization.pt2e.module_names import is_excluded, module_of
from compress.quantization.pt2e.quantizer import LINEAR, is_constant, is_float

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.fx import GraphModule, Node

aten = torch.ops.aten
NORMS = {aten.layer_norm.default: (2, 3), aten.rms_norm.default: (2,)}
"""Operator → places of the weight, and of the bias, that its result is multiplied with last."""
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
ATTENTION = aten.scaled_dot_product_attention.default
HEADS_MERGED = (VIEWS, {aten.transpose.int}, {ATTENTION}, {aten.transpose.int}, VIEWS, {LINEAR})
"""From what attention gives back to the layer that makes its values, operator by operator."""


@dataclass(frozen=True)
class Family:
    """Linear layers and the tensor that all of them read."""

    source: Node
    linears: tuple[Node, ...]

    @property
    def name(self) -> str:
        """Module of the first layer."""
        return module_of(self.linears[0]) or self.linears[0].name

    def weight_OI(self, graph: GraphModule) -> torch.Tensor:  # noqa: N802 - the letters name the axes
        """Return the layers' weights one below the other."""
        return torch.cat([value_of(graph, _weight(linear)) for linear in self.linears])

    def absorbers(self, graph: GraphModule) -> list[Node]:
        """Return the constants that take up a scaling of the source; none where others read it."""
        if set(self.source.users) - set(self.linears):
            return []
        held = _makers(self.source)
        return held if all(len(readers_of(graph, c)) == 1 for c in held) else []

    def divide_(self, graph: GraphModule, scale_I: torch.Tensor) -> set[str]:
        """Divide what the layers read, channel by channel, and multiply their weights, in place.

        The graph computes what it did. What makes the tensor takes the division up where it can: a
        normalization, or a layer before it. Elsewhere a multiplication is inserted.

        Returns:
            Modules whose results now have other scales.
        """
        for linear in self.linears:
            weight = _weight(linear)
            replace_value_(graph, weight, value_of(graph, weight) * scale_I)
        absorbers = self.absorbers(graph)
        for constant in absorbers:
            value = value_of(graph, constant)
            replace_value_(graph, constant, value / scale_I.view(-1, *[1] * (value.dim() - 1)))
        if not absorbers:
            self._multiply_(graph, 1 / scale_I)
        makers = [reader for constant in absorbers for reader in readers_of(graph, constant)]
        return {module_of(maker) for maker in makers if module_of(maker)}

    def _multiply_(self, graph: GraphModule, factor_I: torch.Tensor) -> None:
        name = f"{self.linears[0].name}_smoothing"
        graph.register_buffer(name, factor_I)
        with graph.graph.inserting_after(self.source):
            factor = graph.graph.get_attr(name)
        with graph.graph.inserting_after(factor):
            product = graph.graph.call_function(aten.mul.Tensor, (self.source, factor))
        factor.meta["val"] = factor_I
        product.meta |= {k: v for k, v in self.linears[0].meta.items() if k == "nn_module_stack"}
        product.meta["val"] = self.source.meta["val"]
        for linear in self.linears:
            linear.replace_input_with(self.source, product)


def families(graph: GraphModule, exclude: Sequence[str] = ()) -> list[Family]:
    """Return the linear layers of a graph by the float tensor that they read, in graph order.

    Layers that share a weight with another operator are left out.

    Args:
        graph: a traced module.
        exclude: patterns of names of modules that stay as they are.
    """
    found: dict[Node, list[Node]] = {}
    for node in graph.graph.nodes:
        if node.target is LINEAR and is_float(node.args[0]) and is_constant(node.args[1]):
            alone = len(readers_of(graph, node.args[1])) == 1
            if alone and is_float(node.args[1]) and not is_excluded(node, exclude):
                found.setdefault(node.args[0], []).append(node)
    return [Family(source, tuple(linears)) for source, linears in found.items()]


def drop_copies_(graph: GraphModule) -> None:
    """Let readers of a copy, or of a view of the same shape, read the original, in place.

    In a graph that writes nowhere they are equal. Tracing leaves a copy where a dropout was.
    """
    for node in list(graph.graph.nodes):
        copies = node.target is aten.clone.default or node.target in VIEWS
        original: Any = node.args[0] if copies and not node.kwargs else None
        if original and original.op == "call_function" and _shape(original) == _shape(node):
            node.replace_all_uses_with(original)
            graph.graph.erase_node(node)
    graph.recompile()


def _shape(node: Node) -> list[str]:
    """Return a shape as text: to compare sizes that are not known yet would fix them."""
    return [str(size) for size in node.meta["val"].shape]


def _weight(linear: Node) -> Node:
    weight: Node = linear.args[1]  # type: ignore[assignment]
    return weight


def _makers(node: Node) -> list[Node]:
    """Return the constants whose scaling scales a tensor's channels; none where there are none."""
    if node.target is aten.mul.Tensor:
        constants = [a for a in node.args if is_constant(a) and a.meta["val"].dim() == 1]
        return [c for c in constants if len(c.meta["val"]) == node.meta["val"].shape[-1]][:1]
    if node.target in NORMS:
        places = [place for place in NORMS[node.target] if len(node.args) > place]
        return _constants(node, places) if len(node.args[1]) == 1 else []  # type: ignore[arg-type]
    layer = _value_layer(node) or node
    if layer.target is aten.relu.default and _is_read_once(layer.args[0]):
        layer = layer.args[0]
    return _constants(layer, range(1, len(layer.args))) if layer.target is LINEAR else []


def _constants(node: Node, places: Iterable[int]) -> list[Node]:
    """Return the operands at some places, the first of which is needed; none are no constants."""
    held = [node.args[place] for place in places if node.args[place] is not None]
    return [c for c in held if is_constant(c)] if held and all(map(is_constant, held)) else []


def _value_layer(merged: Node) -> Any:
    """Return the layer that makes the values of an attention, whose channels its result has."""
    chain: list[Any] = [merged]
    for targets in HEADS_MERGED:
        node = chain[-1]
        swaps = node.target is aten.transpose.int
        if node.target not in targets or (swaps and node.args[1:] != (1, 2)):
            return None
        chain.append(node.args[2 if node.target is ATTENTION else 0])
    _, _, attention, values, split, layer, _ = chain
    _, heads, _, size = attention.meta["val"].shape
    same = values.meta["val"].shape[1] == heads and split.meta["val"].shape[2:] == (heads, size)
    whole = merged.meta["val"].dim() == 3 and merged.meta["val"].shape[-1] == heads * size
    return layer if same and whole and all(map(_is_read_once, chain[1:-1])) else None


def _is_read_once(node: Any) -> bool:
    return len(node.users) == 1
