"""torch.export with its habits mended: limits of sizes, and recurrent layers of any length."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.exc import UserError
from torch.export import Dim

from compress.core.recurrence import any_length

if TYPE_CHECKING:
    from torch import nn
    from torch.export import ExportedProgram

SOME_SIZES = "in the specified range satisfy the generated guard"
"""What torch.export says where a graph is right for some sizes of an axis alone."""
LARGEST = re.compile(r"^  (\w+) = Dim\('\1', (?:min=\d+, )?max=(\d+)\)$", re.MULTILINE)


def trace(module: nn.Module, inputs: tuple[torch.Tensor, ...], shapes: Any) -> ExportedProgram:
    """Trace a module, and once more within its limits where it takes only some sizes.

    A table of positions limits the length of a text, and then the axis of the graph; one of the
    batch is not meant so. Guards such as ``(width - 1) // 2 + 1 != 1``, which torch.export
    cannot solve for a range, become checks in the graph.

    Args:
        module: a module in eval mode.
        inputs: an example.
        shapes: the dynamic axes of each input, in the form that torch.export takes.
    """
    with any_length():
        try:
            return torch.export.export(module, inputs, dynamic_shapes=shapes)
        except UserError as error:
            if SOME_SIZES not in str(error):
                raise
            largest = {name: int(size) for name, size in LARGEST.findall(str(error))}
        return torch.export.export(
            module,
            inputs,
            dynamic_shapes=_limited(shapes, largest),
            prefer_deferred_runtime_asserts_over_guards=True,
        )


def _limited(shapes: Any, largest: dict[str, int]) -> Any:
    """Return shapes with the largest sizes of all axes but the first."""
    if isinstance(shapes, tuple):
        return tuple(_limited(part, largest) for part in shapes)
    if not isinstance(shapes, dict):
        return shapes
    limited = {}
    for key, value in shapes.items():
        size = largest.get(value.__name__) if isinstance(value, Dim) and key else None
        limited[key] = _limited(value, largest) if size is None else Dim(value.__name__, max=size)
    return limited
