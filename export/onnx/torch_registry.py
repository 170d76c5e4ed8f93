"""Parts of torch's exporter that are replaced: its table of operators, its choice of overloads."""

from __future__ import annotations

import copy
import functools
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from onnxscript.values import TracedOnnxFunction
from torch.onnx._internal.exporter._registration import ONNXRegistry
from torch.onnx._internal.fx.passes import type_promotion

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


@contextmanager
def numbers_for_tensors() -> Iterator[None]:
    """Have torch's exporter take numbers for operands that are tensors, as calls do, in a block."""
    # Of `1.0 - integers`, torch 2.13 makes `sub.Tensor(1.0, floats)`, whose overload it then does
    # not find: its check of types takes no number for a tensor.
    find: Any = getattr(type_promotion, "find_compatible_op_overload", None)

    def find_overload(packet: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            return find(packet, args, named)
        except RuntimeError:
            as_tensors = (torch.tensor(x) if isinstance(x, int | float) else x for x in args)
            return find(packet, tuple(as_tensors), named)

    with patched_attribute(type_promotion, "find_compatible_op_overload", find_overload):
        yield


@functools.cache
def _registry(_vision: bool, **version: int) -> Any:
    # onnxscript 0.7 parses the source of each function to find its domain, which is its opset's.
    domain_alone = property(lambda self: SimpleNamespace(domain=self.opset.domain))
    with gc_disabled(), patched_attribute(TracedOnnxFunction, "function_ir", domain_alone):
        return _build_registry(**version)
