"""Formats that a model is deployed in: each an artifact type and the stage that writes it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from compress.core.baselines import BASELINES, Runtime
from export.onnx.float_baseline import in_onnxruntime

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

_NAMES_BY_MODULE = {
    "export.aotinductor.stage": ("AotModel", "ExportAot"),
    "export.onnx.stage": ("ExportOnnx", "OnnxModel"),
    "export.exported_program": ("ExportProgram",),
    "export.tensorrt.stage": ("ExportTensorRT", "TensorRTEngine"),
    "export.torchscript.stage": ("ExportTorchScript", "TorchScriptModel"),
}

BASELINES["onnxruntime"] = Runtime(in_onnxruntime, frozenset({"eager", "graph", "onnx"}))

_MODULES = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562): `compress --help` must not load every stage."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
