"""Reduce an ONNX model to some of its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from export.onnx.graph import inputs_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx


def keep_outputs_(model: onnx.ModelProto, names: Sequence[str]) -> None:
    """Keep some outputs, in the order named, with the operators and weights they need, in place.

    Inputs stay, those that nothing reads any more included.
    """
    graph = model.graph
    values = {output.name: output for output in graph.output}
    outputs = [values[name] for name in names]
    needed, nodes = set(names), []
    for node in reversed(graph.node):
        if needed & set(node.output):
            nodes.append(node)
            needed |= set(inputs_of(node))
    weights = [tensor for tensor in graph.initializer if tensor.name in needed]
    for field, content in (("output", outputs), ("node", nodes[::-1]), ("initializer", weights)):
        graph.ClearField(field)
        getattr(graph, field).extend(content)
