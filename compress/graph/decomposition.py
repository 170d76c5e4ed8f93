"""Decompose operators of a graph one by one, without tracing it anew where little is to do.

torch (2.13) traces each graph once more to decompose its operators: half of the time that a small
network takes to be quantized, and two thirds of its export to ONNX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

    Form = Callable[[Graph, Node], Node | None]

aten = torch.ops.aten


def decompose_(
    program: ExportedProgram, forms: Mapping[Any, Form], is_known: Callable[[Node], bool]
) -> bool:
    """Replace the operators of a program that have a form, in place.

    Return whether all that it calls are known then. Where one is not, some may have been replaced,
    with the same values.

    Args:
        program: What is changed.
        forms: Operator → what replaces a node of it.
        is_known: Whether a node that calls something may stay.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        with graph.inserting_before(node):
            replacement = forms.get(node.target, _without_write)(graph, node)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            program.graph_signature.replace_all_uses(node.name, replacement.name)  # of outputs
            graph.erase_node(node)
    program.graph_module.recompile()
    # A `get_attr` is a graph that an operator calls.
    return all(
        is_known(node) if node.op == "call_function" else node.op != "get_attr"
        for node in graph.nodes
    )


def is_composite(operator: OpOverload) -> bool:
    """Whether an operator is made of others on every device."""
    return operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def call(graph: Graph, target: Any, arguments: tuple[Any, ...], like: Node, **named: Any) -> Node:
    """Add a call to a graph, with the metadata of the node that it stands for."""
    node = graph.call_function(target, arguments, named)
    node.meta = {**like.meta}
    return node


def _without_write(graph: Graph, node: Node) -> Node | None:
    """Write into no tensor that nothing else reads, as an in-place activation does."""
    target: Any = node.target
    if not (isinstance(target, OpOverload) and target._schema.is_mutable):
        return None
    x: Any = node.args[0]
    if not isinstance(x, torch.fx.Node):  # a list of tensors
        return None
    maker: Any = x.args[0] if x.target is getitem else x
    made_by = maker.target
    is_its_own = isinstance(made_by, OpOverload) and not any(
        r.alias_info for r in made_by._schema.returns
    )
    tensors = [value for n in node.all_input_nodes if (value := n.meta.get("val")) is not None]
    same_type = len({value.dtype for value in tensors if isinstance(value, torch.Tensor)}) == 1
    name = target._schema.name.removeprefix("aten::")
    functional = getattr(getattr(aten, name.removesuffix("_"), None), target._overloadname, None)
    if not (is_its_own and same_type and len(x.users) == 1 and functional not in (None, target)):
        return None
    return call(graph, functional, node.args, node, **node.kwargs)


def _batch_norm(graph: Graph, node: Node) -> Node | None:
    x, weight, bias, mean, variance, training, momentum, epsilon, *_ = node.args
    if training or None in (weight, bias, mean, variance):
        return None
    arguments = (x, weight, bias, mean, variance, momentum, epsilon)
    three = call(graph, aten._native_batch_norm_legit_no_training.default, arguments, node)
    value = node.meta["val"]
    three.meta["val"] = (value, value.new_empty(0), value.new_empty(0))
    return call(graph, getitem, (three, 0), node)


def _cast(graph: Graph, node: Node) -> Node | None:
    x: Any = node.args[0]
    before, after = x.meta["val"], node.meta["val"]
    schema: Any = node.target._schema  # type: ignore[union-attr]
    named = {a.name: value for a, value in zip(schema.arguments, node.args, strict=False)}
    named |= node.kwargs
    # A copy may be written to.
    if named.get("copy") or named.get("memory_format") or before.device != after.device:
        return None
    if before.dtype == after.dtype:
        return x  # type: ignore[no-any-return]
    return call(graph, aten._to_copy.default, (x,), node, dtype=after.dtype)


def _expand_as(graph: Graph, node: Node) -> Node | None:
    x, other = node.args
    sizes = _sizes(graph, other, range(len(node.meta["val"].shape)))
    return call(graph, aten.expand.default, (x, sizes), node)


def _flatten(graph: Graph, node: Node) -> Node | None:
    x: Any = node.args[0]
    shape = x.meta["val"].shape
    bounds: Any = (*node.args[1:], *(0, -1)[len(node.args) - 1 :])
    first, last = (axis % max(1, len(shape)) for axis in bounds)
    merged = math.prod(shape[first : last + 1])
    if not isinstance(merged, int):
        return None
    before, after = range(first), range(last + 1, len(shape))
    sizes = [*_sizes(graph, x, before), merged, *_sizes(graph, x, after)]
    # No view: what reads the graph may have another layout before it.
    return call(graph, aten.reshape.default, (x, sizes), node)


def _unflatten(graph: Graph, node: Node) -> Node | None:
    given: Any = node.args
    x, axis, parts = given
    count = len(x.meta["val"].shape)
    axis %= count
    sizes = [*_sizes(graph, x, range(axis)), *parts, *_sizes(graph, x, range(axis + 1, count))]
    return call(graph, aten.reshape.default, (x, sizes), node)


def _sizes(graph: Graph, tensor: Any, axes: Iterable[int]) -> list[Any]:
    """Return sizes of a tensor: numbers, and nodes that read what varies."""
    shape = tensor.meta["val"].shape
    return [n if isinstance(n := shape[axis], int) else _size(graph, tensor, axis) for axis in axes]


def _size(graph: Graph, tensor: Node, axis: int) -> Node:
    """Return a node that reads a size, as in a trace from an input, where one has it."""
    # A reader more of the tensor itself would keep its operator from being fused with the next.
    size = tensor.meta["val"].shape[axis]
    inputs = graph.find_nodes(op="placeholder")
    place = next(
        (
            (given, i)
            for given in inputs
            for i, other in enumerate(getattr(given.meta.get("val"), "shape", ()))
            if isinstance(other, torch.SymInt) and other.node.expr == size.node.expr
        ),
        None,
    )
    if place is None:
        node = graph.call_function(aten.sym_size.int, (tensor, axis))
    else:
        readers = (n for n in place[0].users if n.target is aten.sym_size.int and n.args == place)
        known: Node | None = next(readers, None)
        if known is not None:
            inputs[-1].append(known)  # moved before all that may read it
            return known
        with graph.inserting_after(inputs[-1]):
            node = graph.call_function(aten.sym_size.int, place)
    node.meta["val"] = size
    return node


FORMS: dict[Any, Form] = {
    aten.batch_norm.default: _batch_norm,
    **dict.fromkeys((aten.to.dtype, aten.to.device, aten.to.dtype_layout), _cast),
    aten.expand_as.default: _expand_as,
    aten.flatten.using_ints: _flatten,
    aten.unflatten.int: _unflatten,
}
"""Operator → what replaces a node of it as torch's own decomposition does; None where that depends
on more."""
