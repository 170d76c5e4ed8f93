"""Read, replace and remove the parameters and buffers that a captured graph holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node


def value_of(graph: GraphModule, node: Node) -> torch.Tensor:
    """Return the tensor that a `get_attr` node reads."""
    owner, _, name = str(node.target).rpartition(".")
    value: torch.Tensor = getattr(graph.get_submodule(owner), name)
    return value.detach()


def replace_value_(graph: GraphModule, node: Node, value: torch.Tensor) -> None:
    """Make a `get_attr` node read another tensor; the old one, the user's, is not written to."""
    owner, _, name = str(node.target).rpartition(".")
    module = graph.get_submodule(owner)
    value = value.detach().contiguous()
    is_parameter = isinstance(getattr(module, name), torch.nn.Parameter)
    setattr(module, name, torch.nn.Parameter(value, requires_grad=False) if is_parameter else value)


def readers_of(graph: GraphModule, node: Node) -> list[Node]:
    """Return the users of a tensor over all `get_attr` nodes that read it."""
    same = [n for n in graph.graph.nodes if n.op == "get_attr" and n.target == node.target]
    return [reader for n in same for reader in n.users]


def remove_unread_tensors_(graph: GraphModule) -> None:
    """Remove the tensors that no node reads, such as float weights that integers replaced."""
    read = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name, _ in [*graph.named_parameters(), *graph.named_buffers()]:
        if name not in read:
            owner, _, attribute = name.rpartition(".")
            delattr(graph.get_submodule(owner), attribute)
