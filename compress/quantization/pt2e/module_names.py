"""Where in the user's model the operators and tensors of a traced graph lie."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from compress.graph.torch_export import FlatOutputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import GraphModule, Node

    from compress.common.signature import Signature

FLAT_OUTPUTS = f"{FlatOutputs.__module__}.{FlatOutputs.__qualname__}"
INPUT_NAME = "name in the signature"


def module_names(node: Node) -> list[str]:
    """Return the dotted names of the user's modules that a node lies in, outermost first."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    names = [path for path, _ in stack]
    if is_wrapped(node):
        names = [name.removeprefix("module").removeprefix(".") for name in names]
    return [n for n in names if n]


def module_of(node: Node) -> str:
    """Return the innermost of the user's modules that a node lies in; none for the model itself."""
    return (module_names(node) or [""])[-1]


def is_wrapped(node: Node) -> bool:
    """Whether the user's module is the child ``module`` of one that flattens its outputs."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return any(kind == FLAT_OUTPUTS for _, kind in stack)


def is_excluded(node: Node, patterns: Sequence[str]) -> bool:
    """Whether a node lies in a module that is to stay float."""
    return any(fnmatchcase(m, p) for m in module_names(node) for p in patterns)


def name_inputs_(graph: GraphModule, signature: Signature) -> None:
    """Note the signature's names of a graph's inputs, in place."""
    for node, spec in zip(graph.graph.find_nodes(op="placeholder"), signature.inputs, strict=True):
        node.meta[INPUT_NAME] = spec.name


def place(node: Node) -> str:
    """Return in words where a tensor is made."""
    if node.op == "get_attr":
        return f"weight {node.target}"
    if node.op == "placeholder":
        return f"input {node.meta.get(INPUT_NAME, node.name)}"
    return f"{node.name} of {module_of(node) or 'the model'}"
