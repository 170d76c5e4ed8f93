"""What an ONNX model says about itself, in its properties: signature, class names, origin.

The names of an ONNX graph's inputs and outputs, whatever the values inside are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compress import __version__
from compress.common.errors import StageFailed
from compress.common.strict_json import canonical_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import onnx

    from compress.artifacts.artifact import Artifact


def describe_(model: onnx.ModelProto, source: Artifact, class_names: Sequence[str]) -> None:
    """Write properties into a model, in place: each a JSON text, the same for the same source.

    Raises:
        StageFailed: there are more or fewer class names than the first output has classes.
    """
    properties: dict[str, Any] = {
        "provenance": {"source": source.digest, "toolkit": f"compress-pipeline {__version__}"},
        "signature": source.signature.model_dump(mode="json"),
    }
    if class_names:
        refuse_misfit(model, class_names)
        properties["class_names"] = list(class_names)
    for key in sorted(properties):
        model.metadata_props.add(key=key, value=canonical_json(properties[key]))


def refuse_misfit(model: onnx.ModelProto, class_names: Sequence[str]) -> None:
    """Refuse class names that are not one for each class.

    Raises:
        StageFailed: the last axis of the first output is known, and another number.
    """
    axes = model.graph.output[0].type.tensor_type.shape.dim
    classes: int = axes[-1].dim_value if axes else 0
    if classes and classes != len(class_names):
        raise StageFailed(
            f"class_names: {len(class_names)} names, and the first output has {classes} classes"
        )


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
