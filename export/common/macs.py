"""Multiply-accumulates of the operators in a torch graph, oneDNN's included."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from torch.fx import Node

# flop_registry (torch 2.13) has none of these. Packed weights keep the number of their elements.
PRODUCT = re.compile(r"aten\.(linear|_int_mm)\.|onednn\.qlinear|mkldnn\._linear|mkl\._mkl_linear")
CONVOLUTION = re.compile(r"onednn\.qconv|mkldnn\._convolution_pointwise")
TRANSPOSED_CONVOLUTION = "mkldnn._convolution_transpose"
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"
LSTM = "aten.mkldnn_rnn_layer"


def operator_of(node: Node) -> Any:
    """Return the torch operator of a node; executorch wraps it."""
    # An operator of torch has another `_op`, which is not an operator.
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return node.target if is_operator else getattr(node.target, "_op", node.target)


def count_macs(node: Node) -> int:
    """Return the multiply-accumulates of an operator, at the sizes that were traced."""
    operator, output = operator_of(node), node.meta.get("val")
    name = str(operator)
    if PRODUCT.match(name):
        return prod(_sizes(output)) * _sizes_of(node, 0)[-1]
    if CONVOLUTION.match(name):
        weight = 3 if name.startswith("onednn") else 1
        return prod(_sizes(output)) * prod(_sizes_of(node, weight)) // _sizes(output)[1]
    if name.startswith(TRANSPOSED_CONVOLUTION):
        read = _sizes_of(node, 0)
        return prod(read) * prod(_sizes_of(node, 1)) // read[1]
    if name.startswith(ATTENTION):  # of each query with all keys, and of that with all values
        query, key, value = (_sizes_of(node, place) for place in range(3))
        return prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    if name.startswith(LSTM):
        return prod(_sizes_of(node, 0)[:2]) * sum(prod(_sizes_of(node, place)) for place in (1, 2))
    formula = flop_registry.get(getattr(operator, "overloadpacket", None))
    if formula is None:
        return 0
    arguments, options = torch.fx.node.map_arg(
        (node.args, node.kwargs), lambda given: _concrete(given.meta["val"])
    )
    return int(formula(*arguments, **options, out_val=_concrete(output))) // 2


def _sizes_of(node: Node, place: int) -> list[int]:
    """Return the sizes of an operator's input, which may be a weight that Inductor packed."""
    source: Any = node.args[place]
    if "val" not in source.meta and source.op == "get_attr":
        return _sizes(getattr(node.graph.owning_module, source.target))
    return _sizes(source.meta["val"])


def _sizes(tensor: Any) -> list[int]:
    sizes: list[Any] = [*tensor.shape]
    return [s.node.hint if isinstance(s, torch.SymInt) else s for s in sizes]


def _concrete(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda x: torch.empty(_sizes(x), device="meta"), value)
