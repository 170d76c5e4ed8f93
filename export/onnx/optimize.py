"""Rewrite ONNX graphs ahead of time with onnxruntime's own optimizer."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import onnxruntime

from export.onnx.graph import graphs_in
from export.onnx.proto_io import read, write
from export.onnx.session import write_optimized

if TYPE_CHECKING:
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
        file, optimized = Path(folder) / "model.onnx", Path(folder) / "rewritten.onnx"
        write(model, file)
        write_optimized(file, optimized, chosen)
        rewritten = read(optimized, weights=True)
    # onnxruntime lists all operator sets that it knows.
    used = {"", *(node.domain for graph in graphs_in(rewritten.graph) for node in graph.node)}
    versions = {o.domain: o.version for o in rewritten.opset_import if o.domain in used}
    del rewritten.opset_import[:]
    for domain, version in sorted(versions.items()):
        rewritten.opset_import.add(domain=domain, version=version)
    return rewritten
