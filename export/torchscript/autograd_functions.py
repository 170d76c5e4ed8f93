"""Trace torch.autograd.Function subclasses as the operators of their forward pass."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Function = torch.autograd.Function


class _ForwardContext:
    """The `ctx` of a forward pass without a backward pass: it stores nothing."""

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad = (False,) * inputs

    def save_for_backward(self, *_: Any) -> None: ...

    def save_for_forward(self, *_: Any) -> None: ...

    def mark_dirty(self, *_: Any) -> None: ...

    def mark_non_differentiable(self, *_: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


@contextmanager
def inlined_functions() -> Iterator[None]:
    """Have `Function.apply` call `forward` directly, in a block.

    The tracer would record a call of Python code, which no TorchScript file can hold.
    """
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *inputs: Any, **named: Any) -> Any:
        if cls.setup_context is not Function.setup_context:
            return cls.forward(*inputs, **named)
        return cls.forward(_ForwardContext(len(inputs)), *inputs, **named)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Function.apply = original  # type: ignore[method-assign]
