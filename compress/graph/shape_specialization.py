"""Lines of a model's code that fix a dynamic axis to a number, which torch.export does not name."""

from __future__ import annotations

import re
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compress.graph.library_cache import patched_attribute

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[1])
LOOP = re.compile(r"(for|while)\b|.*\brange\(")


@contextmanager
def record_specializations() -> Iterator[dict[int, traceback.FrameSummary]]:
    """Record during a trace the line of the model's code where a symbolic size became each number.

    Wraps a private method of torch 2.13; where a release does not have it, nothing is recorded.
    """
    locations: dict[int, traceback.FrameSummary] = {}
    original: Any = getattr(ShapeEnv, "_set_replacement", None)

    def record(self: ShapeEnv, symbol: Any, value: Any, *rest: Any, **more: Any) -> Any:
        if getattr(value, "is_Integer", False):
            stack = traceback.extract_stack()
            frames = [f for f in stack if not f.filename.startswith((LIBRARY, OURS, "<"))]
            if frames:
                locations.setdefault(int(value), frames[-1])
        return original(self, symbol, value, *rest, **more)

    with patched_attribute(ShapeEnv, "_set_replacement", record):
        yield locations


def describe_location(location: traceback.FrameSummary | None) -> str:
    """Format a line of code in brackets, for an error; empty where it is not known."""
    if location is None:
        return ""
    is_loop = LOOP.match(location.line or "")
    loop = "; a loop in Python is written out" if is_loop else ""
    return f" ({Path(location.filename).name}, line {location.lineno}: {location.line}{loop})"
