"""Insert casts between float32 and half precision into a captured graph."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from compress.quantization.pt2e.quantizer import is_float

if TYPE_CHECKING:
    from torch import fx

aten = torch.ops.aten
ANY_DTYPE = {
    *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "flatten", "unflatten"),
    *("squeeze", "unsqueeze", "expand", "slice", "select", "split", "chunk", "unbind"),
    *("clone", "alias", "detach", "contiguous", "dropout", "relu"),
}
"""Operators that are exact in any precision: their output keeps the dtype of the input."""


def compute_in_half_(
    graph: fx.GraphModule, chosen: set[fx.Node], dtype: torch.dtype
) -> Counter[str]:
    """Compute operators in half precision, hold their weights in it, and count them by kind."""
    rewriter = _CastInserter(graph, chosen, dtype)
    for node in list(graph.graph.nodes):
        rewriter.visit_(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return Counter(operator_name(node) for node in chosen)


@dataclass
class _CastInserter:
    """Visits the nodes in graph order, and tracks which tensors are in half precision."""

    graph: fx.GraphModule
    chosen: set[fx.Node]
    dtype: torch.dtype
    in_half: set[fx.Node] = field(default_factory=set)
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = field(default_factory=dict)
    weights: dict[torch.Tensor, torch.nn.Parameter] = field(default_factory=dict)
    """Weight → its half-precision copy, shared by all of its names."""

    def visit_(self, node: fx.Node) -> None:
        if node.op == "get_attr" and is_float(node) and self._is_read_in_half(node):
            owner, _, name = str(node.target).rpartition(".")
            module = self.graph.get_submodule(owner)
            tensor = getattr(module, name)
            if tensor.dtype is torch.float32:  # not converted through another node yet
                half = torch.nn.Parameter(tensor.detach().to(self.dtype), requires_grad=False)
                delattr(module, name)
                module.register_parameter(name, self.weights.setdefault(tensor, half))
            self.in_half.add(node)
        elif node.target is operator.getitem or operator_name(node) in ANY_DTYPE:
            source = node.all_input_nodes[0]
            if source in self.in_half and _returns_float32(node):
                self.in_half.add(node)
        elif node in self.chosen:
            self._cast_inputs_(node, self.dtype)
            self.in_half.add(node)
        elif node.op in ("call_function", "output"):
            self._cast_inputs_(node, torch.float32)

    def _is_read_in_half(self, tensor: fx.Node) -> bool:
        return any(
            reader in self.chosen
            or (operator_name(reader) in ANY_DTYPE and self._is_read_in_half(reader))
            for reader in tensor.users
        )

    def _cast_inputs_(self, node: fx.Node, dtype: torch.dtype) -> None:
        for source in node.all_input_nodes:
            is_half = source in self.in_half
            if is_float(source) and is_half != (dtype is self.dtype):
                if (source, dtype) not in self.casts:
                    with self.graph.graph.inserting_before(node):
                        cast = self.graph.graph.call_function(aten.to.dtype, (source, dtype))
                    cast.meta |= {k: v for k, v in source.meta.items() if k != "val"}
                    self.casts[source, dtype] = cast
                node.replace_input_with(source, self.casts[source, dtype])


def is_convertible(node: fx.Node) -> bool:
    """Whether a node is an operator from float32 tensors to float32 ones."""
    if node.op != "call_function" or not str(node.target).startswith("aten."):
        return False
    reads = [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    floats = [n for n in reads if n.meta["val"].is_floating_point()]
    return bool(floats) and all(map(is_float, floats)) and _returns_float32(node)


def _returns_float32(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(v, torch.Tensor) and v.dtype is torch.float32 for v in values)


def operator_name(node: fx.Node) -> str:
    """Return an ATen operator's name without namespace, overload and the in-place underscore."""
    parts = str(node.target).split(".")
    return parts[1].rstrip("_") if node.op == "call_function" and len(parts) > 2 else ""
