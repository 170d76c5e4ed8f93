"""Casts between float32 and half precision, put into a traced graph where the two meet."""

from __future__ import annotations

import operator
from collections import Counter
from typing import TYPE_CHECKING

import torch

from compress.quantization.pt2e.quantizer import is_float

if TYPE_CHECKING:
    from torch import fx

aten = torch.ops.aten
PASSING = {
    *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "flatten", "unflatten"),
    *("squeeze", "unsqueeze", "expand", "slice", "select", "split", "chunk", "unbind"),
    *("clone", "alias", "detach", "contiguous", "dropout", "relu"),
}
"""Operators that give back what they read: in whichever precision that is."""


def compute_in_half_(
    graph: fx.GraphModule, chosen: set[fx.Node], dtype: torch.dtype
) -> Counter[str]:
    """Let chosen operators compute in half precision, their weights held in it, in place.

    Returns:
        The number of such operators by kind.
    """
    rewriting = _Rewriting(graph, chosen, dtype)
    for node in list(graph.graph.nodes):
        rewriting.visit_(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return Counter(operator_name(node) for node in chosen)


class _Rewriting:
    """Knows which tensors are in half precision so far."""

    def __init__(self, graph: fx.GraphModule, chosen: set[fx.Node], dtype: torch.dtype) -> None:
        self.graph = graph
        self.chosen = chosen
        self.dtype = dtype
        self.halves: set[fx.Node] = set()
        self.casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        self.weights: dict[torch.Tensor, torch.nn.Parameter] = {}
        """Weight → the same in half precision, shared by all of its names."""

    def visit_(self, node: fx.Node) -> None:
        if node.op == "get_attr" and is_float(node) and self._wanted(node):
            self._hold_(node)
        elif node.target is operator.getitem or operator_name(node) in PASSING:
            source = node.all_input_nodes[0]
            if source in self.halves and _gives_floats(node):
                self.halves.add(node)
        elif node in self.chosen:
            self._cast_inputs_(node, self.dtype)
            self.halves.add(node)
        elif node.op in ("call_function", "output"):
            self._cast_inputs_(node, torch.float32)

    def _wanted(self, tensor: fx.Node) -> bool:
        """Whether something reads a tensor in half precision."""
        return any(
            reader in self.chosen or (operator_name(reader) in PASSING and self._wanted(reader))
            for reader in tensor.users
        )

    def _hold_(self, node: fx.Node) -> None:
        owner, _, name = str(node.target).rpartition(".")
        holder = self.graph.get_submodule(owner)
        tensor = getattr(holder, name)
        if tensor.dtype is torch.float32:
            half = torch.nn.Parameter(tensor.detach().to(self.dtype), requires_grad=False)
            delattr(holder, name)
            holder.register_parameter(name, self.weights.setdefault(tensor, half))
        self.halves.add(node)

    def _cast_inputs_(self, node: fx.Node, dtype: torch.dtype) -> None:
        for source in node.all_input_nodes:
            is_half = source in self.halves
            if is_float(source) and is_half != (dtype is self.dtype):
                node.replace_input_with(source, self._cast(source, dtype, node))

    def _cast(self, source: fx.Node, dtype: torch.dtype, reader: fx.Node) -> fx.Node:
        if (source, dtype) not in self.casts:
            with self.graph.graph.inserting_before(reader):
                made = self.graph.graph.call_function(aten.to.dtype, (source, dtype))
            made.meta |= {k: v for k, v in source.meta.items() if k != "val"}
            self.casts[source, dtype] = made
        return self.casts[source, dtype]


def is_convertible(node: fx.Node) -> bool:
    """Whether a node is an operator from float32 tensors to float32 ones."""
    if node.op != "call_function" or not str(node.target).startswith("aten."):
        return False
    reads = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    floats = [n for n in reads if n.meta["val"].is_floating_point()]
    return bool(floats) and all(map(is_float, floats)) and _gives_floats(node)


def _gives_floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(v, torch.Tensor) and v.dtype is torch.float32 for v in values)


def operator_name(node: fx.Node) -> str:
    """Return an operator's name without namespace, overload and mark of writing in place."""
    parts = str(node.target).split(".")
    return parts[1].rstrip("_") if node.op == "call_function" and len(parts) > 2 else ""
