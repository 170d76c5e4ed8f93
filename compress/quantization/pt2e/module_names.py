"""Map nodes of a captured graph to the modules and inputs of the user's model."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from compress.graph.torch_export import FlatOutputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import GraphModule, Node

    from compress.common.signature import Signature

# `nn_module_stack` names classes by module and qualified name.
FLAT_OUTPUTS = f"{FlatOutputs.__module__}.{FlatOutputs.__qualname__}"
INPUT_NAME = "name in the signature"


def module_names(node: Node) -> list[str]:
    """Return the dotted names of the user's modules that a node belongs to, outermost first."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    names = [path for path, _ in stack]
    if is_wrapped(node):
        names = [name.removeprefix("module").removeprefix(".") for name in names]
    return [n for n in names if n]


def module_of(node: Node) -> str:
    """Return the innermost of the user's modules of a node; empty for the model itself."""
    return (module_names(node) or [""])[-1]


def is_wrapped(node: Node) -> bool:
    """Whether the user's module was exported as the child ``module`` of `FlatOutputs`."""
    stack = (node.meta.get("nn_module_stack") or {}).values()
    return any(kind == FLAT_OUTPUTS for _, kind in stack)


def is_excluded(node: Node, patterns: Sequence[str]) -> bool:
    """Whether a node belongs to a module that one of the patterns matches."""
    return any(fnmatchcase(m, p) for m in module_names(node) for p in patterns)


def name_layers_(graph: GraphModule) -> None:
    """Assign operators to the modules that hold their parameters, where a graph names no modules.

    Sealed programs name none; their parameters keep the names that they had in the model.
    """
    tensors = graph.graph.find_nodes(op="get_attr")
    if any(module_of(reader) for tensor in tensors for reader in tensor.users):
        return
    for tensor in tensors:
        path = str(tensor.target).split(".")[:-1]
        prefixes = [".".join(path[: i + 1]) for i in range(len(path))]
        for reader in tensor.users:
            stack = reader.meta.get("nn_module_stack") or {}
            # One entry for each call, as a module may be called several times.
            calls = {f"{prefix}@{reader.name}": (prefix, "torch.nn.Module") for prefix in prefixes}
            reader.meta["nn_module_stack"] = stack | calls


def name_inputs_(graph: GraphModule, signature: Signature) -> None:
    """Store the signature's input names in the metadata of a graph's placeholders."""
    for node, spec in zip(graph.graph.find_nodes(op="placeholder"), signature.inputs, strict=True):
        node.meta[INPUT_NAME] = spec.name


def describe_tensor(node: Node) -> str:
    """Describe where a tensor comes from, for messages: `relu of layer1`, `input image`."""
    if node.op == "get_attr":
        return f"weight {node.target}"
    if node.op == "placeholder":
        return f"input {node.meta.get(INPUT_NAME, node.name)}"
    return f"{node.name} of {module_of(node) or 'the model'}"
