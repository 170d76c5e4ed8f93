"""Compute what depends on a graph's weights alone once, instead of at each run."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import fx

MAX_BYTES = 2**30


def fold_constants_(graph: fx.GraphModule, max_bytes: int = MAX_BYTES) -> None:
    """Replace values that depend on weights alone, such as dequantized ones, in place.

    Once they take `max_bytes`, the rest is left as it is: computed at each run.
    """
    values: dict[fx.Node, Any] = {}
    size = 0
    for node in list(graph.graph.nodes):
        if node.op == "get_attr":
            values[node] = attrgetter(node.target)(graph)
        elif _is_function(node) and values.keys() >= {*node.all_input_nodes} and size < max_bytes:
            arguments = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*arguments[0], **arguments[1])
            if isinstance(values[node], torch.Tensor):
                size += values[node].nbytes
    for node, value in values.items():
        is_read = any(user not in values for user in node.users)
        if node.op == "get_attr" or not is_read or not isinstance(value, torch.Tensor):
            continue
        name = f"folded_{node.name}"
        graph.register_buffer(name, value, persistent=False)
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(name)
        constant.meta = node.meta
        node.replace_all_uses_with(constant)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _is_function(node: fx.Node) -> bool:
    """Whether a node returns the same for the same inputs, of which it has at least one."""
    schema = getattr(node.target, "_schema", None)
    return (
        node.op == "call_function"
        and bool(node.all_input_nodes)
        and schema is not None
        and not schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags  # type: ignore[union-attr]
    )
