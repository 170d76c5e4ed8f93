"""Functions with a gradient of their own (torch.autograd.Function), traced as what they compute."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Function = torch.autograd.Function


class _Forgetful:
    """What a forward pass keeps for a backward pass that never comes."""

    def __init__(self, inputs: int) -> None:
        self.needs_input_grad = (False,) * inputs

    def save_for_backward(self, *_: Any) -> None: ...

    def save_for_forward(self, *_: Any) -> None: ...

    def mark_dirty(self, *_: Any) -> None: ...

    def mark_non_differentiable(self, *_: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


@contextmanager
def plain_functions() -> Iterator[None]:
    """Let functions with their own gradient be called as any other.

    The tracer would record a call of Python code, which no TorchScript file can hold.
    """
    known = Function.__dict__["apply"]

    def apply(cls: type[Function], *inputs: Any, **more: Any) -> Any:
        if cls.setup_context is not Function.setup_context:
            return cls.forward(*inputs, **more)
        return cls.forward(_Forgetful(len(inputs)), *inputs, **more)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Function.apply = known  # type: ignore[method-assign]
