"""torch's table of ONNX operators, read once in a process, and not in each export."""

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

READER = "from_torchlib"
SOURCE = "function_ir"


@contextmanager
def operators_read_once() -> Iterator[None]:
    """Let torch's exporter have, in a block, a copy of the table where it would make one.

    torch 2.13 makes it of 600 functions in each export: a third of the time of a small model's.
    """
    with patched_attribute(ONNXRegistry, READER, staticmethod(_copied_operators)):
        yield


def _copied_operators(**version: int) -> Any:
    # Operators that are not registered yet are left out, and torchvision registers its own.
    table = copy.copy(_operators("torchvision" in sys.modules, **version))
    table.functions = {name: [*forms] for name, forms in table.functions.items()}
    return table


@functools.cache
def _operators(_vision: bool, **version: int) -> Any:
    """Read the table.

    onnxscript 0.7 parses the source of each function to tell its domain, which is its opset's.
    """
    domain_alone = property(lambda self: SimpleNamespace(domain=self.opset.domain))
    with gc_disabled(), patched_attribute(TracedOnnxFunction, SOURCE, domain_alone):
        return _reads(**version)


_reads = ONNXRegistry.from_torchlib
