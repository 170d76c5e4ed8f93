"""Formats that a model is deployed in: each an artifact type and the stage that writes it.

The public names stand in ``__init__.pyi``; each is imported on first use.
"""

import lazy_loader

# Defining an exporter makes its runtime a baseline of `min_speedup`, in this order in messages.
# isort: off
import export.onnx.stage
import export.openvino.stage
import export.torchscript.stage
import export.aotinductor.stage
import export.executorch.stage
import export.tensorrt.stage
import export.genai.stage
import export.gguf.stage
import export.compressed_tensors.stage
import export.web.runtime  # noqa: F401 - the runtime of `runs_in`
# isort: on

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
