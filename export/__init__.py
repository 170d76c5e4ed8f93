"""Formats that a model is deployed in: each an artifact type and the stage that writes it.

The public names stand in ``__init__.pyi``; each is imported on first use.
"""

import lazy_loader

# Defining an exporter makes its runtime a baseline of `min_speedup`, in this order in messages.
# isort: off
import compress.export.onnx.stage
import compress.export.openvino.stage
import compress.export.torchscript.stage
import compress.export.aotinductor.stage
import compress.export.executorch.stage
import compress.export.tensorrt.stage
import compress.export.genai.stage
import compress.export.gguf.stage
import compress.export.compressed_tensors.stage  # noqa: F401 - all are imported for this effect
# isort: on

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
