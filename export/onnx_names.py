"""The names of an ONNX graph's inputs and outputs, whatever the values inside are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import onnx

INPUT = "compress_input_{}"
OUTPUT = "compress_output_{}"
"""What the exporter is told: torch (2.13) lets a value inside keep a name that an output is given,
and the graph is then invalid."""


def rename_(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Give values other names, in place; those that bear one of these already make way."""
    graphs = list(_graphs(model.graph))
    taken = {name for graph in graphs for name in _names(graph)}
    renamed = dict(names)
    for name in sorted(taken & set(names.values()) - names.keys()):
        number = next(i for i in range(len(taken) + 1) if f"{name}_inside_{i}" not in taken)
        renamed[name] = f"{name}_inside_{number}"
    for graph in graphs:
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = renamed.get(value.name, value.name)
        for node in graph.node:
            node.input[:] = [renamed.get(n, n) for n in node.input]
            node.output[:] = [renamed.get(n, n) for n in node.output]


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Yield a graph and those that its nodes hold, such as the branches of an If."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node or inner.output:
                    yield from _graphs(inner)


def _names(graph: onnx.GraphProto) -> set[str]:
    values = (*graph.input, *graph.output, *graph.value_info, *graph.initializer)
    return {v.name for v in values} | {
        n for node in graph.node for n in (*node.input, *node.output)
    }
