"""Decompose what has no ONNX form, without tracing a graph anew where little has none.

Torch's exporter (2.13) traces each graph once more to decompose its operators: two thirds of the
time that a small network takes. Most operators have a form and stay as they are, and those that
usually have none can be replaced one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.onnx._internal.exporter import _decomp, _fx_passes

from compress.common.foreign.patching import patched_attribute

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

aten = torch.ops.aten


def retraced_where_needed() -> AbstractContextManager[None]:
    """Have torch's exporter trace a graph anew only where it must, in a block."""
    retrace: Any = getattr(_fx_passes, "decompose_with_registry", None)

    def decompose(program: ExportedProgram, registry: Any) -> ExportedProgram:
        if not decompose_(program, {*_decomp.get_onnx_implemented_overloads(registry)}):
            program = retrace(program, registry)
        return program

    return patched_attribute(_fx_passes, "decompose_with_registry", decompose)


def decompose_(program: ExportedProgram, known: set[Any]) -> bool:
    """Replace the operators of a program that are not known, in place.

    Return whether all are known then. Where one is not, or one writes into a tensor, some may have
    been replaced, with the same values.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        with graph.inserting_before(node):
            replacement = FORMS.get(node.target, _without_write)(graph, node)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            program.graph_signature.replace_all_uses(node.name, replacement.name)  # of outputs
            graph.erase_node(node)
    program.graph_module.recompile()
    return all(_is_known(node, known) for node in graph.nodes)


def _is_known(node: Node, known: set[Any]) -> bool:
    if node.op == "get_attr":
        return False  # a graph that an operator calls
    if node.op != "call_function" or node.target is getitem:
        return True
    target: Any = node.target
    if target in ASSERTIONS:  # the exporter removes them
        return True
    if isinstance(target, OpOverload):
        value = node.meta.get("val")
        is_complex = isinstance(value, torch.Tensor) and value.is_complex()
        is_plain = not (target._schema.is_mutable or is_complex)
        return target in known and is_plain and (target in KEPT or not _is_composite_view(target))
    return target in known and not isinstance(target, torch._ops.OperatorBase)  # Python's own


def _is_composite_view(target: OpOverload) -> bool:
    """Whether a trace decomposes an operator, even one that has an ONNX form of its own."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    returns = target._schema.returns
    return any(r.alias_info for r in returns) and target.has_kernel_for_dispatch_key(composite)


def _call(graph: Graph, target: Any, arguments: tuple[Any, ...], like: Node, **named: Any) -> Node:
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
    return _call(graph, functional, node.args, node, **node.kwargs)


def _batch_norm(graph: Graph, node: Node) -> Node | None:
    x, weight, bias, mean, variance, training, momentum, epsilon, *_ = node.args
    if training or None in (weight, bias, mean, variance):
        return None
    arguments = (x, weight, bias, mean, variance, momentum, epsilon)
    three = _call(graph, aten._native_batch_norm_legit_no_training.default, arguments, node)
    value = node.meta["val"]
    three.meta["val"] = (value, value.new_empty(0), value.new_empty(0))
    return _call(graph, getitem, (three, 0), node)


def _adaptive_mean(graph: Graph, node: Node) -> Node | None:
    x, size = node.args
    if not isinstance(size, list | tuple) or [*size] != [1, 1]:
        return None
    return _call(graph, aten.mean.dim, (x, [-1, -2], True), node)


def _cast(graph: Graph, node: Node) -> Node | None:
    x: Any = node.args[0]
    dtype = node.meta["val"].dtype
    if x.meta["val"].dtype == dtype:  # to the CPU, another layout or a copy: the numbers stay
        return x  # type: ignore[no-any-return]
    return _call(graph, aten._to_copy.default, (x,), node, dtype=dtype)


def _expand_as(graph: Graph, node: Node) -> Node | None:
    x, other = node.args
    sizes: Any = node.meta["val"].shape
    read = []
    for axis, size in enumerate(sizes):
        if not isinstance(size, int):
            symbolic = graph.call_function(aten.sym_size.int, (other, axis))
            symbolic.meta["val"], size = size, symbolic
        read.append(size)
    return _call(graph, aten.expand.default, (x, read), node)


def _bitwise_and(graph: Graph, node: Node) -> Node:
    return _call(graph, aten.bitwise_and.Tensor, node.args, node)


def _flatten(graph: Graph, node: Node) -> Node | None:
    x: Any = node.args[0]
    sizes = node.meta["val"].shape
    if len(sizes) != 2 or node.args[1:] != (1,) or not isinstance(sizes[1], int):
        return None
    rows = sizes[0]
    if not isinstance(rows, int):
        rows = graph.call_function(aten.sym_size.int, (x, 0))
        rows.meta["val"] = sizes[0]
    # No view: the exporter may have another layout before it.
    return _call(graph, aten.reshape.default, (x, [rows, sizes[1]]), node)


ASSERTIONS = {
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range_for_size.default,
}
KEPT = {aten.reshape.default, aten.contiguous.default}
"""Composite views whose ONNX form is that of what they are decomposed to."""
FORMS: dict[Any, Callable[[Graph, Node], Node | None]] = {
    aten.batch_norm.default: _batch_norm,
    aten.adaptive_avg_pool2d.default: _adaptive_mean,
    **dict.fromkeys((aten.to.dtype, aten.to.device, aten.to.dtype_layout), _cast),
    aten.expand_as.default: _expand_as,
    aten.__and__.Tensor: _bitwise_and,
    aten.flatten.using_ints: _flatten,
}
"""Operator → what replaces a node of it as torch's own decomposition does; None where that depends
on more."""
