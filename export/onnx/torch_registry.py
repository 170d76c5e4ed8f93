"""Cache torch's table of ONNX operators, which it otherwise builds anew in each export."""

from __future__ import annotations

import copy
import functools
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from onnxscript.values import TracedOnnxFunction
from torch.onnx._internal.exporter._registration import ONNXRegistry

from compress.common.process import gc_disabled
from compress.graph.library_cache import patched_attribute

if TYPE_CHECKING:
    from collections.abc import Iterator

_build_registry = ONNXRegistry.from_torchlib


@contextmanager
def cached_registry() -> Iterator[None]:
    """Have torch's exporter use a copy of a cached table of operators, in a block."""

    # torch 2.13 builds it from 600 functions in each export: a third of a small model's time.
    def copy_of_registry(**version: int) -> Any:
        # Operators that are not registered yet are left out, and torchvision registers its own.
        registry = copy.copy(_registry("torchvision" in sys.modules, **version))
        registry.functions = {name: [*forms] for name, forms in registry.functions.items()}
        return registry

    with patched_attribute(ONNXRegistry, "from_torchlib", staticmethod(copy_of_registry)):
        yield


@functools.cache
def _registry(_vision: bool, **version: int) -> Any:
    # onnxscript 0.7 parses the source of each function to find its domain, which is its opset's.
    domain_alone = property(lambda self: SimpleNamespace(domain=self.opset.domain))
    with gc_disabled(), patched_attribute(TracedOnnxFunction, "function_ir", domain_alone):
        return _build_registry(**version)
