"""Make a program of a graph that came from a trace and was changed, without tracing it again."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
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
TRACED = "trace that an input comes from"  # of a node's metadata


@dataclass(frozen=True)
class Traced:
    """What a trace found of the sizes of a model's inputs."""

    ranges: Any
    """Of a program, its `range_constraints`."""
    conditions: tuple[int, tuple[str, ...]]
    """How many conditions on sizes are left to assert, and the sizes: numbers, or symbols.

    Copies of a graph share the record of their symbols: what one of them asserts or fixes, the
    others have too.
    """


def graph_of_program(program: ExportedProgram) -> GraphModule:
    """Return a program as a graph that may be changed, for :func:`program_of_graph`."""
    graph: GraphModule = program.module(check_guards=False)
    inputs = graph.graph.find_nodes(op="placeholder")
    traced = Traced(program.range_constraints, _conditions([node.meta["val"] for node in inputs]))
    for node in inputs:
        node.meta[TRACED] = traced
    return graph


def program_of_graph(graph: GraphModule, signature: Signature) -> ExportedProgram:
    """Return the program of a graph whose operators were replaced or added.

    It has the operators of the graph. One that :func:`graph_of_program` did not make, or that calls
    modules, or functions of Python on tensors, is traced.
    """
    inputs = graph.graph.find_nodes(op="placeholder")
    if not (
        all(TRACED in node.meta for node in inputs)
        and all(_is_of_programs(graph, node) for node in graph.graph.nodes)
    ):
        return export_program(graph, signature)
    graph.graph.eliminate_dead_code()
    traced, values = inputs[0].meta[TRACED], [node.meta["val"] for node in inputs]
    mode = torch._guards.detect_fake_mode(values)
    is_alike = False
    # Where it raises, as recurrent layers do outside a trace, the trace says what is wrong.
    with suppress(Exception), torch.no_grad():
        FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*values)
        is_alike = _conditions(values) == traced.conditions
    return _lifted(graph, signature, mode) if is_alike else export_program(graph, signature)


def _conditions(inputs: list[torch.Tensor]) -> tuple[int, tuple[str, ...]]:
    shapes: Any = torch._guards.detect_fake_mode(inputs).shape_env  # type: ignore[union-attr]
    asserted = getattr(shapes, "num_deferred_runtime_asserts", 0)
    return asserted, tuple(str(size) for value in inputs for size in value.shape)


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
            tensor.target = tensor.name  # made unique, and what may be an argument's name
            tensor.meta["val"] = mode.from_tensor(value, static_shapes=True)
            copies |= dict.fromkeys(readers[name], tensor)
            is_kept = name in stored if kind is InputKind.BUFFER else None
            specs.append(InputSpec(kind, TensorArgument(tensor.name), name, is_kept))
    given = graph.graph.find_nodes(op="placeholder")
    for node in given:
        copies[node] = lifted.node_copy(node)
        copies[node].target = copies[node].name
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
        given[0].meta[TRACED].ranges,
        [ModuleCallEntry("", call)],
        (signature.example(), {}),
        constants,
    )
    # They name inputs as the trace of the user's module did; `range_constraints` say the same.
    program._guards_code = []
    return program
