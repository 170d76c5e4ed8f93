"""`torch`, its functions `F`, `np` and `transformers`: imported when a name is first read.

For modules that `--help`, reading a pipeline file, or a run of cached results import: none of these
needs torch, whose import takes seconds.
"""

# Not `lazy_loader.load`, which enters its stand-in into `sys.modules`, where others look whether
# torch has been imported.

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["F", "np", "torch", "transformers"]


class _LazyModule:
    """Stands for a module: from the first use on it has the module's own names."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        module = import_module(self.__name__)
        self.__dict__ = vars(module)  # the same dictionary: as fast as the module, and as new
        return getattr(module, name)


if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.nn.functional as F
    import transformers
else:
    np, torch, F, transformers = map(
        _LazyModule, ("numpy", "torch", "torch.nn.functional", "transformers")
    )
