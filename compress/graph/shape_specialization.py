"""Where a model's code turns an axis into a number, which torch.export does not tell."""

from __future__ import annotations

import re
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = str(Path(torch.__file__).parent)
OURS = str(Path(__file__).parents[1])
LOOP = re.compile(r"(for|while)\b|.*\brange\(")


@contextmanager
def record_specializations() -> Iterator[dict[int, traceback.FrameSummary]]:
    """Note during a trace the line of the model's code where each number came to be.

    By a method of torch 2.13 that no document names; where it is another, nothing is noted.
    """
    found: dict[int, traceback.FrameSummary] = {}
    replace = getattr(ShapeEnv, "_set_replacement", None)

    def noting(self: ShapeEnv, symbol: Any, value: Any, *rest: Any, **more: Any) -> Any:
        if getattr(value, "is_Integer", False):
            frames = [f for f in traceback.extract_stack() if not _is_tracer(f.filename)]
            if frames:
                found.setdefault(int(value), frames[-1])
        return None if replace is None else replace(self, symbol, value, *rest, **more)

    if replace is None:
        yield found
        return
    owner: Any = ShapeEnv
    owner._set_replacement = noting
    try:
        yield found
    finally:
        owner._set_replacement = replace


def describe_location(place: traceback.FrameSummary | None) -> str:
    """Return a place in words, in brackets; nothing where it is not known."""
    if place is None:
        return ""
    told = f" ({Path(place.filename).name}, line {place.lineno}: {place.line}"
    return (
        f"{told}; a loop in Python is written out)" if LOOP.match(place.line or "") else f"{told})"
    )


def _is_tracer(file: str) -> bool:
    return file.startswith((LIBRARY, OURS)) or file.startswith("<")
