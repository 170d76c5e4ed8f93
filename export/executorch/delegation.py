"""What XNNPACK computes of a lowered program, and what is left to ExecuTorch's own kernels."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import flop_registry

from export.parity.subgraph import module_of

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
    `integer_kernels` and `float_kernels` count the operators that multiply matrices.
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
    for node in (*delegated, *portable):
        if count_macs(node):
            reads_integers = "dequantize" in str(getattr(node.args[1], "target", ""))
            group = "integer_kernels" if reads_integers and node in delegated else "float_kernels"
            kinds[group][name_of(node)] += 1
    ours, theirs = (sum(map(count_macs, nodes)) for nodes in (delegated, portable))
    if not ours + theirs:
        ours, theirs = len(delegated), len(portable)
    return {
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


def operator_of(node: Node) -> Any:
    """Return the torch operator of a node; executorch wraps it."""
    return getattr(node.target, "_op", node.target)


def name_of(node: Node) -> str:
    """Return an operator's name without its overload, as `aten.view_copy`."""
    return ".".join(str(operator_of(node)).split(".")[:2])


def count_macs(node: Node) -> int:
    """Return the multiply-accumulates of an operator, at the sizes that were traced."""
    operator = operator_of(node)
    output = node.meta.get("val")
    if operator is aten.linear.default:
        return _elements(output) * int(_sizes(node.args[1].meta["val"])[-1])  # type: ignore[union-attr]
    formula = flop_registry.get(operator.overloadpacket)
    if formula is None:
        return 0
    arguments, options = torch.fx.node.map_arg(
        (node.args, node.kwargs), lambda given: _concrete(given.meta["val"])
    )
    return int(formula(*arguments, **options, out_val=_concrete(output))) // 2


def _elements(tensor: Any) -> int:
    return int(torch.Size(_sizes(tensor)).numel())


def _sizes(tensor: torch.Tensor) -> list[int]:
    sizes: list[Any] = [*tensor.shape]
    return [s.node.hint if isinstance(s, torch.SymInt) else s for s in sizes]


def _concrete(value: Any) -> Any:
    """Return a tensor without numbers of the sizes that were traced."""
    if isinstance(value, torch.Tensor):
        return torch.empty(_sizes(value), device="meta")
    if isinstance(value, list | tuple):
        return type(value)(_concrete(item) for item in value)
    return value
