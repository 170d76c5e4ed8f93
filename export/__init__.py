"""Formats that a model is deployed in: each an artifact type and the stage that writes it.

The public names stand in ``__init__.pyi``; each is imported on first use.
"""

import lazy_loader

from compress.core.gate_kinds.baselines import BASELINES, BaselineRuntime
from compress.core.gate_kinds.other_runtime import OTHER_RUNTIMES
from export.onnx.float_baseline import onnxruntime_baseline
from export.openvino.stage import OPENVINO, openvino_baseline
from export.web.runtime import WEB

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

READS_ONNX = frozenset({"eager", "graph", "onnx"})
BASELINES["onnxruntime"] = BaselineRuntime(onnxruntime_baseline, READS_ONNX)
BASELINES["openvino"] = BaselineRuntime(openvino_baseline, READS_ONNX, (OPENVINO,))
OTHER_RUNTIMES["web"] = WEB
