"""Make a program of a graph that came from a trace and was changed, without tracing it again."""

from __future__ import annotations

from contextlib import suppress
from operator import attrgetter, getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree

from compress.graph.torch_export import export_program

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

    from compress.common.signature import Signature

SIZES = (int, bool, torch.SymInt, torch.SymBool)
RANGES = "sizes that axes may have"  # of an input's metadata


def graph_of_program(program: ExportedProgram) -> GraphModule:
    """Return a program as a graph, of which :func:`program_of_graph` makes one again."""
    graph: GraphModule = program.module(check_guards=False)
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta[RANGES] = program.range_constraints
    return graph


def program_of_graph(graph: GraphModule, signature: Signature) -> ExportedProgram:
    """Return the program of a graph whose operators were replaced or added.

    It has the operators of the graph. One that :func:`graph_of_program` did not make, or that calls
    modules, or functions of Python on tensors, is traced.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    if not (
        all(RANGES in node.meta for node in inputs)
        and all(_is_of_programs(graph, node) for node in graph.graph.nodes)
    ):
        return export_program(graph, signature)
    graph.graph.eliminate_dead_code()
    values = [node.meta["val"] for node in inputs]
    mode = torch._guards.detect_fake_mode(values)
    before = _conditions(mode, values)
    # Recurrent layers have no sizes of their results outside a trace.
    with suppress(RuntimeError):
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*values)
        if _conditions(mode, values) == before:
            return _lifted(graph, signature, mode)
    return export_program(graph, signature)  # which tells what fixes a size


def _conditions(mode: Any, inputs: list[torch.Tensor]) -> tuple[int, int]:
    """Count what operators assert of sizes, and the sizes of inputs that are fixed."""
    sizes: list[Any] = [size for value in inputs for size in value.shape]
    fixed = sum(isinstance(n, int) or n.node.maybe_as_int() is not None for n in sizes)
    return getattr(mode.shape_env, "num_deferred_runtime_asserts", 0), fixed


def _is_of_programs(graph: GraphModule, node: Node) -> bool:
    if node.op == "get_attr":
        return isinstance(attrgetter(str(node.target))(graph), torch.Tensor)
    if node.op == "output":
        return all(isinstance(value, fx.Node) for value in _pytree.tree_leaves(node.args))
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return node.op not in ("call_module", "call_method")
    # Of Python's functions, those of sizes.
    return node.target is getitem or isinstance(node.meta.get("val"), SIZES)


def _lifted(graph: GraphModule, signature: Signature, mode: Any) -> ExportedProgram:
    """Return a program whose inputs are the tensors that a graph reads, and then the graph's."""
    readers: dict[str, list[Node]] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        readers.setdefault(str(node.target), []).append(node)
    parameters = {name for name, _ in graph.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in graph.named_buffers(remove_duplicate=False)}
    stored = graph.state_dict(keep_vars=True)
    lifted, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    specs, state, constants = list[InputSpec](), dict[str, Any](), dict[str, Any]()
    for kind, names in (
        (InputKind.PARAMETER, parameters),
        (InputKind.BUFFER, buffers - parameters),
        (InputKind.CONSTANT_TENSOR, readers.keys() - parameters - buffers),
    ):
        for name in filter(names.__contains__, readers):
            value = attrgetter(name)(graph)
            (state if name in stored else constants)[name] = value
            tensor = lifted.placeholder(f"{kind.name[0].lower()}_{name.replace('.', '_')}")
            tensor.meta["val"] = mode.from_tensor(value, static_shapes=True)
            copies |= dict.fromkeys(readers[name], tensor)
            is_kept = name in stored if kind is InputKind.BUFFER else None
            specs.append(InputSpec(kind, TensorArgument(tensor.name), name, is_kept))
    given = graph.graph.find_nodes(op="placeholder")
    for node in given:
        copies[node] = lifted.node_copy(node)
    results = _pytree.tree_leaves(lifted.graph_copy(graph.graph, copies))
    lifted.output(tuple(results))
    inputs, outputs = (
        [TensorArgument(node.name) for node in nodes]
        for nodes in ([copies[node] for node in given], results)
    )
    specs += [InputSpec(InputKind.USER_INPUT, argument, None) for argument in inputs]
    trees: Any = graph.graph._codegen
    call = ModuleCallSignature(
        [*inputs],
        [*outputs],
        trees.pytree_info.in_spec,
        trees.pytree_info.out_spec,
        [str(node.target) for node in given],
    )
    program = ExportedProgram(
        torch.nn.Module(),
        lifted,
        ExportGraphSignature(
            specs, [OutputSpec(OutputKind.USER_OUTPUT, argument, None) for argument in outputs]
        ),
        state,
        given[0].meta[RANGES],
        [ModuleCallEntry("", call)],
        (signature.example(), {}),
        constants,
    )
    # They name inputs as the trace of the user's module did; `range_constraints` say the same.
    program._guards_code = []
    return program
