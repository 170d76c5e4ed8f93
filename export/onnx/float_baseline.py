"""The baseline `onnxruntime` of speedup gates: a model in ONNX Runtime, not compressed."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor


@contextmanager
def onnxruntime_baseline(model: Artifact, device: str, threads: int) -> Iterator[Predictor]:
    """Export a model to ONNX with default settings and open it; an ONNX model is opened as it is.

    Raises:
        StageFailed: it cannot be exported.
    """
    from compress.artifacts.eager_model import EagerModel
    from compress.artifacts.graph_model import GraphModel
    from compress.core.context import Context
    from export.onnx.stage import ExportOnnx

    with TemporaryDirectory() as folder:
        if isinstance(model, EagerModel | GraphModel):
            stage = ExportOnnx(name="plain_onnxruntime")
            model = stage.run(model, Context(root=Path(folder) / "onnx", threads=threads))
        with model.open(device, threads) as predict:
            yield predict
