"""An ONNX model with some of its outputs alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import onnx


def keep_outputs_(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Give some outputs in the order named, in place; what they do not need goes.

    Inputs stay, those that nothing reads any more included.
    """
    graph = model.graph
    values = {output.name: output for output in graph.output}
    kept = [values[name] for name in names]
    needed, nodes = set(names), []
    for node in reversed(graph.node):
        if needed & set(node.output):
            nodes.append(node)
            needed |= set(_read(node))
    weights = [tensor for tensor in graph.initializer if tensor.name in needed]
    for field, content in (("output", kept), ("node", nodes[::-1]), ("initializer", weights)):
        graph.ClearField(field)
        getattr(graph, field).extend(content)


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the values that a node reads, also those that its subgraphs take from around it."""
    yield from node.input
    for attribute in node.attribute:
        for part in (attribute.g, *attribute.graphs):
            yield from (output.name for output in part.output)
            for inner in part.node:
                yield from _read(inner)
