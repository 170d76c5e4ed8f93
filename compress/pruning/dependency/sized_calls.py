"""Find the calls in modules' methods that take sizes, such as ``x.view(B, T, C)``, as they run."""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from compress.artifacts.edits.named_sizes import (
    INDEX,
    PARTED,
    SHAPED,
    calls_in,
    method_source,
    sizes_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from compress.artifacts.edits.named_sizes import SizedExpression

TORCH = f"{Path(torch.__file__).parent}{os.sep}"
CALL_KEY = "sized_call"
"""Where a node of the graph has the index of its call among those recorded."""


@dataclass(frozen=True)
class SizedCall:
    """A call, or an index, in a method of a module that takes sizes, and can be replaced."""

    module: str
    kind: type
    """The module's class."""
    method: str
    call: SizedExpression
    tree: ast.FunctionDef
    """The method in which the call lies."""

    def sizes(self, rank: int) -> dict[int, int]:
        """Return axis of a result with ``rank`` axes → index of its size among those of the call.

        Sizes that lie in an unpacked sequence, and one that torch computes (-1), are left out.
        """
        sizes = sizes_of(self.call) or []
        unpacked = [i for i, size in enumerate(sizes) if isinstance(size, ast.Starred)]
        # Behind an unpacked sequence axes are counted from the end.
        from_end = rank - len(sizes)
        first = unpacked[0] if unpacked else len(sizes)
        last = unpacked[-1] if unpacked else -1
        return {
            (i if i < first else i + from_end): i
            for i, size in enumerate(sizes)
            if (i < first or i > last) and ast.unparse(size) != "-1"
        }

    def bounds(self, axis: int, rank: int) -> Iterator[tuple[int, str]]:
        """Yield the bounds of the slice of an axis: index among all bounds, "start" or "end"."""
        if not isinstance(self.call, ast.Subscript):
            return
        index = self.call.slice
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        place = 0
        for i, part in enumerate(parts):
            if isinstance(part, ast.Slice):
                is_after = any(not isinstance(before, ast.Slice) for before in parts[:i])
                for bound, name in ((part.lower, "start"), (part.upper, "end")):
                    if bound is not None:
                        if axis == (i + rank - len(parts) if is_after else i):
                            yield place, name
                        place += 1

    def attribute(self, index: int) -> str | None:
        """Return the name of the module's attribute that a size is, or None for other code."""
        size = (sizes_of(self.call) or [])[index]
        own = self.tree.args.args[0].arg
        is_own = isinstance(size, ast.Attribute) and isinstance(size.value, ast.Name)
        return size.attr if is_own and size.value.id == own else None  # type: ignore[attr-defined]


class SizedCallRecorder(TorchFunctionMode):
    """Marks the nodes of a graph, while torch.export makes it, with the calls that led to them."""

    def __init__(self, module: nn.Module) -> None:
        """Record the calls of a module and of those in it."""
        super().__init__()
        self.calls: list[SizedCall] = []
        self._names = {id(part): name for name, part in reversed([*module.named_modules()])}
        self._known: dict[tuple[object, ...], int | None] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch; a call that takes sizes marks the nodes that it makes."""
        index = None
        if getattr(func, "__name__", "") in (*SHAPED, *PARTED, INDEX):
            index = self._index(sys._getframe(1))
        if index is None:
            return func(*args, **(kwargs or {}))
        with fx.traceback.annotate({CALL_KEY: index}):
            return func(*args, **(kwargs or {}))

    def _index(self, frame: FrameType | None) -> int | None:
        """Return the index of the call that runs in the innermost frame that is not torch's."""
        while frame is not None and frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        if frame is None:
            return None
        # Lines and columns of the expression that the frame runs, start and end in turn.
        _, end_line, _, end_column = list(frame.f_code.co_positions())[frame.f_lasti // 2]
        # A comprehension has a frame of its own within that of its method.
        inner = frame
        while frame is not None and not self._is_method(frame):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename != inner.f_code.co_filename:
            return None
        owner = frame.f_locals[frame.f_code.co_varnames[0]]
        key = (id(owner), frame.f_code, end_line, end_column)
        if key not in self._known:
            kind, name = type(owner), frame.f_code.co_name
            tree = method_source(kind, name, frame.f_code)
            self._known[key] = None
            for call in calls_in(tree) if tree is not None else ():
                # The end, as the start of a call in a chain over several lines is not the tree's.
                if (call.end_lineno, call.end_col_offset) == (end_line, end_column):
                    assert tree is not None
                    self._known[key] = len(self.calls)
                    self.calls.append(SizedCall(self._names[id(owner)], kind, name, call, tree))
                    break
        return self._known[key]

    def _is_method(self, frame: FrameType) -> bool:
        code = frame.f_code
        if not code.co_argcount or not code.co_varnames:
            return False
        return id(frame.f_locals.get(code.co_varnames[0])) in self._names
