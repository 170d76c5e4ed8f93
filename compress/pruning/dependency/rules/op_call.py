"""One call of an ATen operator, of which a rule reads the arguments and returns labels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from compress.pruning.dependency.rules.channel_labels import WILD, LabelBook, Labels, Weight

COMPUTED = "its weight is computed from others, as weight_norm and other parametrizations do"

Result: TypeAlias = Labels | list[Labels]


@dataclass(frozen=True)
class Call:
    """One operator of the graph: arguments by name, tensors among them as labels or weights."""

    operator: str
    """Name without the underscore of its in-place variant."""
    target: Any
    arguments: dict[str, Any]
    tensors: list[Labels | Weight]
    """All tensors among the arguments, in order."""
    shapes: list[tuple[int, ...]]
    """Shapes of the results."""
    gives_list: bool
    """Whether it returns several tensors, or a list of them."""
    module: str
    """The module that calls it; empty for the outermost one."""
    node: str
    """Name of its node in the graph."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """Return an argument, or None where this overload has none of that name."""
        return self.arguments.get(name)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.shapes[0]

    def results(self, label: int) -> Result:
        """Return results whose elements all have one label."""
        labels = [torch.tensor(label).expand(shape) for shape in self.shapes]
        return labels if self.gives_list else labels[0]


Rule: TypeAlias = Callable[[Call, LabelBook], Result | Weight]


def pin_layer(call: Call, book: LabelBook, reason: str) -> Result:
    """Pin all channels that a layer reads and outputs, and record why."""
    weights = (tensor.name for tensor in call.tensors if isinstance(tensor, Weight))
    book.opaque_layers.setdefault(call.module or next(weights, call.operator), reason)
    return pin_all(call, book, reason)


def pin_all(call: Call, book: LabelBook, reason: str) -> Result:
    """Pin all channels of the operands and of the results."""
    operands = [book.labels_of(tensor) for tensor in call.tensors]
    if all(bool((labels == WILD).all()) for labels in operands):
        return call.results(WILD)  # computed from constants only, like a mask
    for labels in operands:
        book.pin(labels, reason)
    return call.results(book.pinned_label(reason))
