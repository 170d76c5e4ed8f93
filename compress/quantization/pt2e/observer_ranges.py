"""Ranges of a prepared graph: watched while it is observed, then made to fit, and told of."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch.fx import Node

from compress.common.errors import StageFailed
from compress.quantization.pt2e.graph_constants import value_of
from compress.quantization.pt2e.histogram_observer import Histogram
from compress.quantization.pt2e.module_names import module_of, name_inputs_, place
from compress.quantization.pt2e.observers import RangeObserver
from compress.quantization.pt2e.qspec import SMALLEST_SCALE
from compress.quantization.pt2e.quantizer import CLAMPS, CONVOLUTIONS, WEIGHTED
from compress.quantization.pt2e.torchao_api import MinMaxObserver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.fx import GraphModule

    from compress.common.signature import Signature

LARGEST_BIAS = 2.0**30
"""Half of what 32 bits hold; the products are added to it."""
WORST = 5
"""Saturated ranges that are named."""


@dataclass
class Watch:
    """What one observer is given: refused unless finite, and remembered."""

    observer: MinMaxObserver
    node: Node
    name: str
    """The user's module that makes the activation, the input, or the place in words."""
    low: torch.Tensor | None = None
    high: torch.Tensor | None = None
    histogram: Histogram | None = None
    """Where the observer may cut values off and does not count them itself."""
    _axis: int | None = None

    def __post_init__(self) -> None:
        """Find the axis of the channels, and whether values are to be counted."""
        head = _head(self.node)
        if head.target in WEIGHTED:
            self._axis = 1 if head.target in CONVOLUTIONS else self.node.meta["val"].dim() - 1
        is_weight = self.node.op == "get_attr"
        if not is_weight and type(self.observer) is not MinMaxObserver:
            counted = isinstance(self.observer, RangeObserver)
            self.histogram = self.observer.seen if counted else Histogram()

    def __call__(self, observer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Look at a tensor before the observer does; a hook."""
        values = inputs[0].detach()
        if values.numel() == 0:
            return
        channels = [axis for axis in range(values.dim()) if axis != self._axis]
        same_axes = values.dim() == self.node.meta["val"].dim()
        reduced = channels if self._axis is not None and same_axes else []
        low, high = values.amin(reduced), values.amax(reduced)
        if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
            refuse_unless_finite(values, place(self.node))
        if self.low is None or self.high is None:
            self.low, self.high = low, high
        elif low.shape == self.low.shape:  # an observer may serve a pooling or a view too
            self.low, self.high = torch.minimum(low, self.low), torch.maximum(high, self.high)
        if self.histogram is not None and not isinstance(self.observer, RangeObserver):
            self.histogram.to(values.device).add_(values)

    @property
    def constant(self) -> float | None:
        """The value that the whole activation had throughout, where it had one."""
        if self.low is None or self.high is None or self.low.amin() < self.high.amax():
            return None
        return float(self.high.amax())

    def dead(self) -> str:
        """Return in words what never changed, or nothing."""
        if self.constant is not None:
            return f"always {self.constant:g}"
        if self.low is None or self.high is None or self.low.dim() == 0:
            return ""
        still = int(torch.eq(self.low, self.high).sum())
        return f"{still} of {len(self.low)} channels never change" if still else ""

    def clipped(self) -> float:
        """Return the share of values that lie outside the range by more than rounding."""
        if self.histogram is None or self.histogram.total == 0:
            return 0.0
        scale, zero_point = self.observer.calculate_qparams()
        ends = scale.new_tensor([self.observer.quant_min - 0.5, self.observer.quant_max + 0.5])
        ends = (ends - zero_point) * scale
        low, high = self.histogram.below(ends).tolist()
        total = self.histogram.total
        # A bin may be wider than a step of 16 bits: where nothing lies beyond an end, say so.
        low = 0.0 if self.low is not None and ends[0] <= self.low.amin() else low
        high = total if self.high is not None and ends[1] >= self.high.amax() else high
        return 1 - (high - low) / total


@dataclass
class Watches:
    """What all observers of a prepared graph were given."""

    of: list[Watch] = field(default_factory=list)

    def facts(self) -> dict[str, dict[str, float] | dict[str, str]]:
        """Return the most saturated ranges and the dead ones, by the user's module.

        Call this when the ranges are final: it asks each observer for its own.
        """
        clipped: dict[str, float] = {}
        dead: dict[str, str] = {}
        for watch in self.of:
            share = float(f"{watch.clipped():.3g}")
            if share > 0:
                clipped[watch.name] = max(clipped.get(watch.name, 0), share)
            if found := watch.dead():
                dead[watch.name] = found
        worst = sorted(clipped, key=lambda name: -clipped[name])[:WORST]
        return {
            "saturated_ranges": {name: clipped[name] for name in worst},
            "dead_ranges": dead,
        }

    def refuse_constant_inputs(self) -> None:
        """Refuse a sample in which a quantized input is the same throughout.

        Raises:
            StageFailed: so it is; the message names the input.
        """
        for watch in self.of:
            if watch.node.op == "placeholder" and watch.constant is not None:
                raise StageFailed(
                    f"calibration: {watch.name} is {watch.constant:g} in every sample, "
                    "expected values that vary; bring samples like those of use"
                )


@contextmanager
def watching(prepared: GraphModule, signature: Signature) -> Iterator[Watches]:
    """Watch what a prepared graph's observers are given, until the end of a block.

    Raises:
        StageFailed: it is NaN or infinite; the message names the place.
    """
    watches, hooks, known = Watches(), [], set()
    nodes = prepared.graph.nodes
    name_inputs_(prepared, signature)
    for node in nodes:
        if node.op == "call_module":
            observer, source = observer_of(prepared, node), observed(node)
            if id(observer) not in known:  # one observer may serve several places
                known.add(id(observer))
                watch = Watch(observer, source, layer(source))
                hooks.append(observer.register_forward_pre_hook(watch))
                if watch.node.op != "get_attr":
                    watches.of.append(watch)
    try:
        yield watches
    finally:
        for hook in hooks:
            hook.remove()


def fit_ranges_(prepared: GraphModule) -> None:
    """Widen the ranges of weights so that each bias fits its 32 bits, in place.

    A bias is held in steps of input scale times weight scale. Where these are so small that it
    would overflow, the products are lost beside the bias, and the channel's weights can be coarser.

    Raises:
        StageFailed: a range is so small that the products of its scale would vanish.
    """
    for node in prepared.graph.nodes:
        if node.op == "call_module" and hasattr(observer_of(prepared, node), "max_val"):
            _refuse_vanishing(observer_of(prepared, node), place(observed(node)))
    for nodes in rounded_biases(prepared):
        source, weight = (observer_of(prepared, part) for part in nodes[:2])
        scale, _ = source.calculate_qparams()
        least_O = least_weight_scale(value_of(prepared, observed(nodes[2])), scale)
        weight.max_val = torch.maximum(weight.max_val, least_O * weight.quant_max)


def rounded_biases(prepared: GraphModule) -> Iterator[tuple[Node, Node, Node]]:
    """Yield what calls the observers of input, weight and bias, of layers whose bias is rounded."""
    for node in prepared.graph.nodes:
        bias = node.args[2] if node.target in WEIGHTED and len(node.args) > 2 else None
        if isinstance(bias, Node) and bias.op == "call_module":
            yield (*node.args[:2], bias)


def least_weight_scale(bias_O: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """Return the least scale of each channel's weights with which its bias fits 32 bits."""
    return bias_O.abs() / (input_scale * LARGEST_BIAS)


def observer_of(prepared: GraphModule, node: object) -> MinMaxObserver:
    """Return the observer that a node of a prepared graph calls."""
    return prepared.get_submodule(str(cast("Node", node).target))


def observed(node: Node) -> Node:
    """Return the node that an observer looks at."""
    return cast("Node", node.args[0])


def layer(node: Node) -> str:
    """Return the user's module that makes an activation, else its place in words."""
    head = _head(node)
    return (module_of(head) if head.target in WEIGHTED else "") or place(node)


def refuse_unless_finite(values: torch.Tensor, where: str) -> None:
    """Refuse NaN and infinity.

    Raises:
        StageFailed: there is one.
    """
    if not torch.isfinite(values).all():
        raise StageFailed(
            f"calibration: {where} is NaN or infinite, expected finite numbers; mend the data or "
            "the weights"
        )


def _head(node: Node) -> Node:
    """Return the layer whose result a fused activation clamps, else the node itself."""
    return cast("Node", node.args[0]) if node.target in CLAMPS else node


def _refuse_vanishing(observer: MinMaxObserver, where: str) -> None:
    largest = max(float(observer.min_val.abs().max()), float(observer.max_val.abs().max()))
    scale, _ = observer.calculate_qparams()
    if largest > 0 and float(scale.max()) <= SMALLEST_SCALE:
        steps = observer.quant_max - observer.quant_min
        raise StageFailed(
            f"calibration: {where} is {largest:.2g} at most, too small for {steps.bit_length()} "
            f"bits; expected {steps * SMALLEST_SCALE:.2g} or more; rescale the data or the weights"
        )
