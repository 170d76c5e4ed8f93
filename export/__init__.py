"""Formats that a model is deployed in: each an artifact type and the stage that writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.core.lazy import imported_on_use
from compress.core.runtimes import RUNTIMES, Runtime
from export.plain_onnx import in_onnxruntime

if TYPE_CHECKING:
    from export.aot import AotModel, ExportAot
    from export.onnx import ExportOnnx, OnnxModel
    from export.program import ExportProgram
    from export.tensorrt import ExportTensorRT, TensorRTEngine
    from export.torchscript import ExportTorchScript, TorchScriptModel

__all__ = [
    "AotModel",
    "ExportAot",
    "ExportOnnx",
    "ExportProgram",
    "ExportTensorRT",
    "ExportTorchScript",
    "OnnxModel",
    "TensorRTEngine",
    "TorchScriptModel",
]

_HOMES = {
    "export.aot": ("AotModel", "ExportAot"),
    "export.onnx": ("ExportOnnx", "OnnxModel"),
    "export.program": ("ExportProgram",),
    "export.tensorrt": ("ExportTensorRT", "TensorRTEngine"),
    "export.torchscript": ("ExportTorchScript", "TorchScriptModel"),
}

RUNTIMES["onnxruntime"] = Runtime(in_onnxruntime, frozenset({"eager", "graph", "onnx"}))

__getattr__ = imported_on_use(__name__, _HOMES)
