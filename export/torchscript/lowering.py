"""TorchScript from a torch.export graph, with torch's own quantized kernels."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.fx.graph import CodeGen

from compress.artifacts.graph_model import reshape_views_
from compress.common.errors import StageFailed, first_line
from compress.export.torchscript.file_io import quiet
from compress.export.torchscript.lowering import lower_quantized_

if TYPE_CHECKING:
    from torch.export import ExportedProgram

aten = torch.ops.aten
HEAVY = {"conv1d", "conv2d", "conv3d", "linear", "lstm", "gru"}
"""Operators whose float kernels are counted."""


def script(program: ExportedProgram) -> tuple[torch.jit.ScriptModule, dict[str, dict[str, int]]]:
    """Return a program as TorchScript, and how many integer and float kernels it calls.

    Raises:
        StageFailed: TorchScript has no form of an operator.
    """
    # Scripted and not traced, so that the sizes of named axes stay computed; and not frozen:
    # freezing would turn integer weights back into floats.
    graph = without_guards(program.module(check_guards=False))
    with quiet():
        lower_quantized_(graph)
    kernels = count_kernels(graph)
    graph.graph.eliminate_dead_code()
    for node in [n for n in graph.graph.nodes if n.op == "get_attr" and not n.users]:
        graph.graph.erase_node(node)
    read = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name, _ in list(graph.named_buffers()):
        if name not in read:  # a weight that a kernel has packed
            delattr(graph, name)
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            node.target = node.target.overloadpacket  # scripting knows operators, not overloads
    graph.recompile()
    # The first class of a name in a process gets no number, which would make two files differ: so
    # another one is scripted first.
    first = fx.GraphModule({}, fx.symbolic_trace(torch.nn.Identity()).graph)
    try:
        with quiet():
            torch.jit.script(first)
            return torch.jit.script(graph.eval()), kernels
    except Exception as error:
        raise StageFailed(
            f"TorchScript cannot express the graph: {type(error).__name__}: {first_line(error)}"
        ) from error


def without_guards(module: fx.GraphModule) -> fx.GraphModule:
    """Return a program's module as operators and tensors alone, without torch.export's checks."""
    graph = module.graph
    graph.set_codegen(CodeGen())
    reshape_views_(module)  # the outputs of integer convolutions have channels last
    for node in list(graph.nodes):
        if node.op == "call_module" or node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)  # checks of inputs and types
        elif node.target is aten.sym_size.int:
            node.op, node.target = "call_method", "size"
        elif node.op == "output" and len(node.args[0]) == 1:
            node.args = node.args[0]
    tensors = {}
    for node in [n for n in graph.nodes if n.op == "get_attr"]:
        tensor = attrgetter(str(node.target))(module)
        if not isinstance(tensor, torch.Tensor):
            raise StageFailed(f"TorchScript has no form of the graph's part {node.target}")
        node.target = str(node.target).replace(".", "__")
        tensors[node.target] = tensor.detach()
    return fx.GraphModule(tensors, graph)


def count_kernels(graph: fx.GraphModule) -> dict[str, dict[str, int]]:
    """Count the integer kernels, and the heavy operators that are computed in floats."""
    called = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    integer = Counter(name for name in called if name.startswith(("quantized.", "aten.quantized_")))
    heavy = Counter(
        name.split(".")[1]
        for name in called
        if name.startswith("aten.") and name.split(".")[1] in HEAVY
    )
    return {
        "integer_kernels": {name.split(".")[1]: integer[name] for name in sorted(integer)},
        "float_kernels": dict(sorted(heavy.items())),
    }
