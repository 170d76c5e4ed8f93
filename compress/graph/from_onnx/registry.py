"""The table of ONNX operators that have an equivalent in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
    """Register a function for operators of ONNX's standard domain."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register
