"""Decompose what has no ONNX form, without tracing a graph anew where little has none."""

from __future__ import annotations

from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.onnx._internal.exporter import _decomp, _fx_passes

from compress.common.foreign.patching import patched_attribute
from compress.graph.decomposition import FORMS, call, decompose_, is_composite

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.export import ExportedProgram
    from torch.fx import Graph, Node

aten = torch.ops.aten


def retraced_where_needed() -> AbstractContextManager[None]:
    """Have torch's exporter trace a graph anew only where it must, in a block."""
    retrace: Any = getattr(_fx_passes, "decompose_with_registry", None)

    def decompose(program: ExportedProgram, registry: Any) -> ExportedProgram:
        known = {*_decomp.get_onnx_implemented_overloads(registry)}
        if not decompose_(program, ONNX_FORMS, lambda node: _is_known(node, known)):
            program = retrace(program, registry)
        return program

    return patched_attribute(_fx_passes, "decompose_with_registry", decompose)


def _is_known(node: Node, known: set[Any]) -> bool:
    target: Any = node.target
    if target is getitem or target in ASSERTIONS:  # the exporter removes assertions
        return True
    if isinstance(target, OpOverload):
        value = node.meta.get("val")
        is_complex = isinstance(value, torch.Tensor) and value.is_complex()
        is_plain = not (target._schema.is_mutable or is_complex)
        return target in known and is_plain and (target in KEPT or not _is_composite_view(target))
    return target in known and not isinstance(target, torch._ops.OperatorBase)  # Python's own


def _is_composite_view(target: OpOverload) -> bool:
    """Whether a trace decomposes an operator, even one that has an ONNX form of its own."""
    return any(r.alias_info for r in target._schema.returns) and is_composite(target)


def _adaptive_mean(graph: Graph, node: Node) -> Node | None:
    x, size = node.args
    if not isinstance(size, list | tuple) or [*size] != [1, 1]:
        return None
    return call(graph, aten.mean.dim, (x, [-1, -2], True), node)


def _bitwise_and(graph: Graph, node: Node) -> Node:
    return call(graph, aten.bitwise_and.Tensor, node.args, node)


ASSERTIONS = {
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range_for_size.default,
}
KEPT = {aten.reshape.default, aten.contiguous.default}
"""Composite views whose ONNX form is that of what they are decomposed to."""
ONNX_FORMS = {
    **FORMS,
    aten.adaptive_avg_pool2d.default: _adaptive_mean,
    aten.__and__.Tensor: _bitwise_and,
}
