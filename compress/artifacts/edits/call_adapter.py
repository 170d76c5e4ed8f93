"""Calling a user's module with the signature's tensors: inputs by name, outputs by choice."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from compress.common.forward import outputs_by_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def call_by_name_(module: torch.nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Make a module take tensors in another order and return a tuple of chosen outputs, in place.

    Its class becomes a subclass of the same name; no parameter is renamed.

    Args:
        module: the module.
        inputs: the parameter of forward for each tensor; none to pass them on by position.
        outputs: names of the outputs to return, in order; none to return the output unchanged.
    """
    kind = type(module)
    signature = inspect.signature(kind.forward)

    def forward(self: torch.nn.Module, *tensors: torch.Tensor) -> Any:
        if inputs:
            output = kind.forward(self, **dict(zip(inputs, tensors, strict=True)))
        else:
            output = kind.forward(self, *tensors)
        if not outputs:
            return output
        entries = outputs_by_name(output)
        return tuple(entries[name] for name in outputs)

    if inputs:
        # torch.export reads the parameters' names and number here.
        self_parameter, *_ = signature.parameters.values()
        each = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in inputs]
        signature = inspect.Signature([self_parameter, *each])
    forward.__signature__ = signature  # type: ignore[attr-defined]
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "forward": forward}
    module.__class__ = type(kind.__name__, (kind,), members)
