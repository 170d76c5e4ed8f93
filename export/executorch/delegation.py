"""What XNNPACK computes of a lowered program, and what is left to ExecuTorch's own kernels."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from export.common.macs import count_macs, operator_of
from export.parity.bisect import module_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.export import ExportedProgram
    from torch.fx import Node

aten = torch.ops.aten
SIZE_OPERATORS = {aten.sym_size.int}
"""Operators on sizes, for which no kernel runs."""


def describe_delegation(program: ExportedProgram) -> dict[str, Any]:
    """Return facts of a program after partitioning, in which a delegate is one call.

    `delegated_share` is XNNPACK's share of the multiply-accumulates, or of the operators where
    there are none. `portable_operators` has the others by the module that they belong to.
    `integer_kernels` and `float_kernels` count the operators that multiply matrices, and
    `integer_share` is the integer ones' share of the multiply-accumulates.
    """
    delegated = [
        node
        for name, module in program.graph_module.named_children()
        if name.startswith("lowered_module")
        for node in operators(module.original_module.graph)
    ]
    portable = list(operators(program.graph))
    by_module: dict[str, Counter[str]] = {}
    for node in portable:
        by_module.setdefault(module_of(node), Counter())[name_of(node)] += 1
    kinds: dict[str, Counter[str]] = {"integer_kernels": Counter(), "float_kernels": Counter()}
    macs: Counter[str] = Counter()
    for node in (*delegated, *portable):
        if count := count_macs(node):
            reads_integers = "dequantize" in str(getattr(node.args[1], "target", ""))
            group = "integer_kernels" if reads_integers and node in delegated else "float_kernels"
            kinds[group][name_of(node)] += 1
            macs[group] += count
    ours, theirs = (sum(map(count_macs, nodes)) for nodes in (delegated, portable))
    if not ours + theirs:
        ours, theirs = len(delegated), len(portable)
    return {
        "integer_share": macs["integer_kernels"] / macs.total() if macs else None,
        "delegated_share": ours / (ours + theirs) if ours + theirs else 1.0,
        "delegated_operators": len(delegated),
        "portable_operators": {m: dict(sorted(by_module[m].items())) for m in sorted(by_module)},
        **{group: dict(sorted(counts.items())) for group, counts in kinds.items()},
    }


def operators(graph: torch.fx.Graph) -> Iterator[Node]:
    """Yield the nodes of a graph for which a kernel runs."""
    for node in graph.nodes:
        operator = operator_of(node)
        if isinstance(operator, torch._ops.OpOverload) and operator not in SIZE_OPERATORS:
            yield node


def name_of(node: Node) -> str:
    """Return an operator's name without its overload, as `aten.view_copy`."""
    return ".".join(str(operator_of(node)).split(".")[:2])
