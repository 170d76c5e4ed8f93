"""Reading and replacing the tensors that a traced graph holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node


def value_of(graph: GraphModule, node: Node) -> torch.Tensor:
    """Return the tensor that a node stands for."""
    owner, _, name = str(node.target).rpartition(".")
    value: torch.Tensor = getattr(graph.get_submodule(owner), name)
    return value.detach()


def replace_value_(graph: GraphModule, node: Node, value: torch.Tensor) -> None:
    """Let a node stand for another tensor, in place; the old one, the user's, is not changed."""
    owner, _, name = str(node.target).rpartition(".")
    module = graph.get_submodule(owner)
    held = getattr(module, name)
    value = value.detach().contiguous()
    is_parameter = isinstance(held, torch.nn.Parameter)
    setattr(module, name, torch.nn.Parameter(value, requires_grad=False) if is_parameter else value)


def readers_of(graph: GraphModule, node: Node) -> list[Node]:
    """Return what reads a tensor, through whichever node."""
    same = [n for n in graph.graph.nodes if n.op == "get_attr" and n.target == node.target]
    return [reader for n in same for reader in n.users]
