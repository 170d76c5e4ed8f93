"""Make a trained PyTorch model small and fast, and prove what was kept.

The public names stand in ``__init__.pyi``, for type checkers and for lazy_loader, which imports
each on first use: ``compress --help`` must not import torch.
"""

import importlib
import logging
from typing import Any

import lazy_loader

__version__ = "0.1.0.dev0"

_own_attribute, _own_names, _own = lazy_loader.attach_stub(__name__, __file__)

# This package imports none of those above it. Users look for the functions of all stages in one
# place nevertheless, so these names alone are looked up there, when somebody asks for them.
_OF_OTHER_PACKAGES = {
    "export_aot": "compress.export.functional",
    "export_compressed_tensors": "compress.export.functional",
    "export_executorch": "compress.export.functional",
    "export_fastest": "compress.export.functional",
    "export_genai": "compress.export.functional",
    "export_gguf": "compress.export.functional",
    "export_onnx": "compress.export.functional",
    "export_openvino": "compress.export.functional",
    "export_program": "compress.export.functional",
    "export_tensorrt": "compress.export.functional",
    "export_torchscript": "compress.export.functional",
    "package_kserve": "compress.serve.functional",
    "package_torchserve": "compress.serve.functional",
    "package_triton": "compress.serve.functional",
    "auto": "compress.pipelines.auto.function",
    "optimize": "compress.pipelines.optimize",
    "bench": "compress.pipelines.bench",
}
__all__ = [*_own, *_OF_OTHER_PACKAGES]  # noqa: PLE0604 - both hold names


def _is_no_import_noise(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "Failed to load" not in text and "is an Enum subclass" not in text


# What torchao 0.18 logs where it is imported: absent CUDA libraries, its own deprecations. Here, as
# transformers imports it, too, from the user's code.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).addFilter(_is_no_import_noise)


def __getattr__(name: str) -> Any:
    if name in _OF_OTHER_PACKAGES:
        return getattr(importlib.import_module(_OF_OTHER_PACKAGES[name]), name)
    return _own_attribute(name)


def __dir__() -> list[str]:
    return [*_own_names(), *_OF_OTHER_PACKAGES]
