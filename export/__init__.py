"""Formats that a model is deployed in: each an artifact type and the stage that writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.common.lazy_imports import imported_on_use
from compress.core.baselines import BASELINES, Runtime
from export.onnx.float_baseline import onnxruntime_baseline

if TYPE_CHECKING:
    from export.aotinductor.stage import AotModel, ExportAot
    from export.exported_program import ExportProgram
    from export.onnx.stage import ExportOnnx, OnnxModel
    from export.tensorrt.stage import ExportTensorRT, TensorRTEngine
    from export.torchscript.stage import ExportTorchScript, TorchScriptModel

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
    "export.aotinductor.stage": ("AotModel", "ExportAot"),
    "export.onnx.stage": ("ExportOnnx", "OnnxModel"),
    "export.exported_program": ("ExportProgram",),
    "export.tensorrt.stage": ("ExportTensorRT", "TensorRTEngine"),
    "export.torchscript.stage": ("ExportTorchScript", "TorchScriptModel"),
}

BASELINES["onnxruntime"] = Runtime(onnxruntime_baseline, frozenset({"eager", "graph", "onnx"}))

__getattr__ = imported_on_use(__name__, _HOMES)
