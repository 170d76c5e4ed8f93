"""The table of ONNX operators that have an equivalent in PyTorch."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

from compress.graph.from_onnx.shape_tensor import to_tensor

OPERATORS: dict[str, Callable[..., Any]] = {}
"""Operator type → function of the node and its inputs that returns the output, or a tuple."""


class Unsupported(Exception):
    """Raised for an operator, or a form of it, that has no equivalent."""


@dataclass(frozen=True)
class Node:
    """An ONNX node: what it reads and writes by name, and its attributes as plain values."""

    operator: str
    name: str
    inputs: tuple[str, ...]
    """Names of values; empty for an optional input that is left out."""
    outputs: tuple[str, ...]
    opset: int
    """Version of the operator set."""
    attributes: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, Any] = field(default_factory=dict)
    """Attribute → the graph of a branch or a loop's body."""

    def get(self, attribute: str, default: Any = None) -> Any:
        """Return an attribute's value."""
        return self.attributes.get(attribute, default)


def operator(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function for operators of ONNX's standard domain.

    What it annotates as tensors it gets as tensors, everything else as it was computed.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _, *parameters = inspect.signature(function).parameters.values()
        wanted = [str(p.annotation).startswith("Tensor") for p in parameters]

        def call(node: Node, *values: Any) -> Any:
            pairs = zip(values, chain(wanted, repeat(wanted[-1])), strict=False)
            return function(node, *(to_tensor(v) if is_tensor else v for v, is_tensor in pairs))

        OPERATORS.update(dict.fromkeys(names, call if any(wanted) else function))
        return function

    return register
