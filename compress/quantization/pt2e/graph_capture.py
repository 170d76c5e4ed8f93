"""Capture a module as a functional ATen graph, and copy such graphs."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING

from compress.graph.library_cache import cached_composite_ops
from compress.graph.torch_export import export_program
from compress.quantization.pt2e.graph_capture import name_layers_

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch
    from torch.export import ExportedProgram
    from torch.fx import GraphModule

    from compress.common.signature import Signature


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
