"""ONNX graphs rewritten ahead of time by onnxruntime's own optimizer."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import onnxruntime

from export.onnx.proto_io import read, write
from export.onnx.session import optimized_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx


def optimize(model: onnx.ModelProto, level: Literal["basic", "extended"]) -> onnx.ModelProto:
    """Return a model as onnxruntime rewrites it.

    Args:
        model: the model; a large one loses its weights, as in :func:`export.onnx.proto_io.write`.
        level: `basic` folds constants and BatchNorm, and gives standard operators; `extended` also
            fuses them into onnxruntime's own, which no other runtime knows.
    """
    levels = onnxruntime.GraphOptimizationLevel
    # The level above these changes layouts for the processor that it runs on.
    chosen = {"basic": levels.ORT_ENABLE_BASIC, "extended": levels.ORT_ENABLE_EXTENDED}[level]
    with TemporaryDirectory(prefix="compress-onnx-") as folder:
        file = Path(folder) / "model.onnx"
        write(model, file)
        rewritten = read(
            optimized_file(file, Path(folder) / "rewritten.onnx", chosen), weights=True
        )
    _drop_unused_domains_(rewritten)
    return rewritten


def _drop_unused_domains_(model: onnx.ModelProto) -> None:
    """Keep of the operator sets, which onnxruntime lists all, those that are used, in place."""
    used = {"", *_domains(model.graph)}
    kept = sorted((o for o in model.opset_import if o.domain in used), key=lambda o: o.domain)
    versions = {opset.domain: opset.version for opset in kept}
    del model.opset_import[:]
    for domain, version in versions.items():
        model.opset_import.add(domain=domain, version=version)


def _domains(graph: onnx.GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield node.domain
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _domains(attribute.g)
