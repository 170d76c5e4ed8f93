"""What a module costs, and what it would cost with fewer channels, before it is cut."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from compress.data.batch import Batch
from compress.graph.flops import count_macs
from compress.pruning.importance.layer_calls import LayerCall, watched

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from torch import nn

    from compress.pruning.dependency.channel_groups import AxisGraph


@dataclass(frozen=True)
class Estimate:
    """A cost as a sum over weights, each in proportion to its size, and a rest that stays."""

    graph: AxisGraph
    shapes: Mapping[str, tuple[int, ...]]
    per_entry: Mapping[str, float]
    """Weight → cost of each of its entries."""
    rest: float

    def of(self, removed: Iterable[int]) -> float:
        """Return the cost without some channels."""
        kept = self.graph.kept(removed)
        total = self.rest
        for name, shape in self.shapes.items():
            axes = {axis: len(indices) for axis, indices in kept.get(name, {}).items()}
            total += self.per_entry[name] * prod(axes.get(i, n) for i, n in enumerate(shape))
        return total


def parameters_of(module: nn.Module) -> int:
    """Count a module's weights, tied ones once."""
    return sum(p.numel() for p in module.parameters())


def macs_of(module: nn.Module, inputs: Sequence[torch.Tensor]) -> int:
    """Count a module's multiply-accumulates for one sample."""
    return count_macs(module, inputs)


def parameter_estimate(module: nn.Module, graph: AxisGraph) -> Estimate:
    """Return how many weights a module has, which is exact."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    return Estimate(graph, shapes, dict.fromkeys(shapes, 1.0), 0.0)


def mac_estimate(module: nn.Module, graph: AxisGraph, inputs: Sequence[torch.Tensor]) -> Estimate:
    """Return the multiply-accumulates of a module, as if the products of attention stayed."""
    found: dict[str, float] = {}

    def watch(call: LayerCall) -> None:
        axis = call.channel_axis
        places = call.output.numel() / call.output.shape[axis] / len(inputs[0])
        found[call.weight] = found.get(call.weight, 0.0) + places

    watched(copy.deepcopy(module), [Batch(tuple(inputs), None)], watch, "cpu")
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters() if name in found}
    known = sum(found[name] * prod(shape) for name, shape in shapes.items())
    return Estimate(graph, shapes, found, max(0.0, macs_of(module, inputs) - known))
