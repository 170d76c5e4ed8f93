"""Formats that a model is deployed in: each an artifact type and the stage that writes it.

The public names stand in ``__init__.pyi``; each is imported on first use.
"""

import lazy_loader

from compress.core.baselines import BASELINES, BaselineRuntime
from export.onnx.float_baseline import onnxruntime_baseline

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

BASELINES["onnxruntime"] = BaselineRuntime(
    onnxruntime_baseline, frozenset({"eager", "graph", "onnx"})
)
