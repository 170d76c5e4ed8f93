"""Cut a torch.export graph: all that a node depends on, or one operator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx

from compress.common.errors import StageFailed, first_line
from compress.graph.axis_bounds import trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.export import ExportedProgram

    from compress.common.signature import Signature


def is_value(node: fx.Node) -> bool:
    """Whether a node is an operator whose result is one tensor."""
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)


def values_before(node: fx.Node) -> list[fx.Node]:
    """Return the nearest nodes of one tensor that a node is computed from, inputs left out."""
    values: dict[fx.Node, None] = {}
    for argument in node.all_input_nodes:
        if is_value(argument):
            values[argument] = None
        else:  # such as a split into several tensors, or a size
            values |= dict.fromkeys(values_before(argument))
    return list(values)


def ancestors(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of one tensor that a node depends on, and itself, in execution order."""
    needed, pending = {node}, [node]
    while pending:
        new = [n for n in pending.pop().all_input_nodes if n not in needed]
        needed.update(new)
        pending += new
    return [n for n in node.graph.nodes if n in needed and is_value(n)]


def prefix(module: fx.GraphModule, ends: Sequence[fx.Node]) -> fx.GraphModule:
    """Return a module that takes the same inputs and returns the values of some nodes."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in module.graph.nodes:
        if node.op != "output":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in ends))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph).eval()


def single_operator(module: fx.GraphModule, node: fx.Node) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Return a module of one operator with its weights, and the nodes that are its inputs.

    Raises:
        StageFailed: the operator takes a size, or one of several results of another.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = [n for n in node.all_input_nodes if n.op != "get_attr"]
    if not inputs or not all(is_value(n) or n.op == "placeholder" for n in inputs):
        raise StageFailed(f"{node.name} cannot stand alone")
    for position, argument in enumerate(inputs):
        copies[argument] = graph.placeholder(f"input_{position}")
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            copies[argument] = graph.node_copy(argument)
    graph.output((graph.node_copy(node, copies.__getitem__),))
    return fx.GraphModule(module, graph).eval(), inputs


def retrace(
    module: fx.GraphModule, signature: Signature, inputs: Sequence[torch.Tensor]
) -> ExportedProgram:
    """Export a part of a graph as a program of its own; StageFailed where torch.export cannot."""
    try:
        with torch.no_grad():
            return trace(module, inputs, signature)
    except Exception as error:
        raise StageFailed(f"torch.export: {first_line(error)}") from error


def module_of(node: fx.Node) -> str:
    """Return the path of the user's module that a node belongs to; empty where it is not known."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    wrapped = bool(stack) and str(stack[0][1]).endswith("FlatOutputs")
    for path, _ in reversed(stack):
        name = str(path).removeprefix("module").lstrip(".") if wrapped else str(path)
        if name and name.isascii() and "empty_nn_module" not in name:
            return name
    # A stored graph has no such names, but its weights have.
    weights = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    return next((w.rpartition(".")[0] for w in weights if "." in w), "")


def operator_of(node: fx.Node) -> str:
    """Return the name of the operator that computes a node."""
    if node.all_input_nodes and "getitem" in str(node.target):
        return operator_of(node.all_input_nodes[0])
    return str(node.target)
