"""Capture a module as an ATen graph, map its nodes to modules, and replace its constants."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from copy import deepcopy
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch

from compress.graph.library_cache import cached_composite_ops
from compress.graph.torch_export import FlatOutputs, export_program

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.export import ExportedProgram
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


def capture(module: torch.nn.Module, signature: Signature) -> GraphModule:
    """Export a module in eval mode as a graph without in-place writes; it is not changed."""
    program = functionalize(export_program(module, signature))
    graph: GraphModule = program.module(check_guards=False)
    name_layers_(graph)
    return graph


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """Return an equal program that writes into no tensor."""
    # Dequantizing a quantized tensor makes a copy: a write into a view of it would not reach the
    # other readers of the original.
    with _without_treespec_warnings(), cached_composite_ops():
        decomposed: ExportedProgram = program.run_decompositions({})
        return decomposed


def copy_graph(graph: GraphModule, shared: Iterable[torch.Tensor] = ()) -> GraphModule:
    """Deep-copy a graph with its observers, but not its tensors in `shared`."""
    with _without_treespec_warnings():
        return deepcopy(graph, {id(tensor): tensor for tensor in shared})


@contextmanager
def _without_treespec_warnings() -> Iterator[None]:
    """Hide torch's deprecation warning about a check that its own export code makes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
        yield


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
    same = graph.graph.find_nodes(op="get_attr", target=node.target)
    return [reader for tensor in same for reader in tensor.users]


def remove_unread_tensors_(graph: GraphModule) -> None:
    """Remove the tensors that no node reads, such as float weights that integers replaced."""
    read = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name, _ in [*graph.named_parameters(), *graph.named_buffers()]:
        if name not in read:
            owner, _, attribute = name.rpartition(".")
            delattr(graph.get_submodule(owner), attribute)
