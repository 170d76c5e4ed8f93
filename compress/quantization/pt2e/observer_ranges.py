"""Ranges of a prepared graph: monitor them during calibration, fit biases, report saturation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.fx import GraphModule, Node

from compress.common.errors import StageFailed
from compress.quantization.pt2e.graph_capture import (
    describe_tensor,
    module_of,
    name_inputs_,
    readers_of,
    replace_value_,
    value_of,
)
from compress.quantization.pt2e.observers import Histogram, RangeObserver
from compress.quantization.pt2e.quantizer import (
    CLAMPS,
    CONVOLUTIONS,
    SMALLEST_SCALE,
    WEIGHTED,
    is_constant,
)
from compress.quantization.pt2e.torchao_api import MinMaxObserver

if TYPE_CHECKING:
    from compress.common.signature import Signature

LARGEST_BIAS = 2.0**30
"""Half of what int32 holds; the other half is left for the products added to the bias."""
WORST = 5  # saturated ranges that are reported


@dataclass
class RangeMonitor:
    """Checks that what one observer sees is finite, and summarizes it."""

    observer: MinMaxObserver
    node: Node
    name: str
    """The user's module that makes the activation, the input, or a description of the tensor."""
    low: torch.Tensor | None = None
    """Smallest value so far; of each channel, where `node` is the output of a layer."""
    high: torch.Tensor | None = None
    histogram: Histogram | None = None
    """Present where the observer may clip values."""
    _channel_axis: int | None = None

    def __post_init__(self) -> None:
        layer = _layer_before_clamp(self.node)
        if layer.target in WEIGHTED:
            is_convolution = layer.target in CONVOLUTIONS
            self._channel_axis = 1 if is_convolution else self.node.meta["val"].dim() - 1
        is_weight = self.node.op == "get_attr"
        if not is_weight and type(self.observer) is not MinMaxObserver:
            has_histogram = isinstance(self.observer, RangeObserver)
            self.histogram = self.observer.histogram if has_histogram else Histogram()

    @contextmanager
    def attached(self) -> Iterator[None]:
        """See the observer's inputs before it does, in a block."""
        observer: Any = self.observer
        if type(observer) is not MinMaxObserver:

            def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
                self.add(*inputs)

            with observer.register_forward_pre_hook(add):
                yield
            return
        # It would read each tensor once more, for extremes that are known by then.
        observer.forward = self._observe
        try:
            yield
        finally:
            del observer.forward

    def _observe(self, values: torch.Tensor) -> torch.Tensor:
        """Take the place of a `MinMaxObserver`'s own `forward`."""
        if (extremes := self.add(values)) is not None:
            low, high = self.observer.min_val, self.observer.max_val
            low.copy_(torch.minimum(low, extremes[0].amin()))
            high.copy_(torch.maximum(high, extremes[1].amax()))
        return values

    def add(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Summarize a tensor, and return its extremes; refuse NaN and infinity."""
        values = values.detach()
        if values.numel() == 0:
            return None
        other_axes = [axis for axis in range(values.dim()) if axis != self._channel_axis]
        same_rank = values.dim() == self.node.meta["val"].dim()
        reduced = other_axes if self._channel_axis is not None and same_rank else []
        # Not `aminmax`, which takes 18 times as long where channels are last (torch 2.13).
        low, high = values.amin(reduced), values.amax(reduced)
        # Extremes are NaN or infinite where a value is: the tensor is read again only then.
        if not (torch.isfinite(low).all() and torch.isfinite(high).all()):
            require_finite(values, describe_tensor(self.node))
        if self.low is None or self.high is None:
            self.low, self.high = low, high
        elif low.shape == self.low.shape:  # an observer may be shared with a pooling or a view
            self.low, self.high = torch.minimum(low, self.low), torch.maximum(high, self.high)
        if self.histogram is not None and not isinstance(self.observer, RangeObserver):
            self.histogram.to(values.device).add_(values)
        return low, high

    @property
    def constant(self) -> float | None:
        """The value that the whole tensor had in every sample, or None where it varied."""
        if self.low is None or self.high is None or self.low.amin() < self.high.amax():
            return None
        return float(self.high.amax())

    def dead_channels(self) -> str:
        """Describe the channels that never changed; empty where all did."""
        if self.constant is not None:
            return f"always {self.constant:g}"
        if self.low is None or self.high is None or self.low.dim() == 0:
            return ""
        constant = int(torch.eq(self.low, self.high).sum())
        return f"{constant} of {len(self.low)} channels never change" if constant else ""

    def saturated_share(self) -> float:
        """Return the share of values outside the range by more than half a step."""
        if self.histogram is None or self.low is None or self.high is None:
            return 0.0
        scale, zero_point = self.observer.calculate_qparams()
        ends = scale.new_tensor([self.observer.quant_min - 0.5, self.observer.quant_max + 0.5])
        ends = (ends - zero_point) * scale
        return self.histogram.share_outside(ends, self.low.amin(), self.high.amax())


def range_facts(monitors: list[RangeMonitor]) -> dict[str, dict[str, Any]]:
    """Return the most saturated ranges and the dead channels by module, once ranges are final."""
    saturated: dict[str, float] = {}
    dead: dict[str, str] = {}
    for monitor in monitors:
        share = float(f"{monitor.saturated_share():.3g}")
        if share > 0:
            saturated[monitor.name] = max(saturated.get(monitor.name, 0), share)
        if description := monitor.dead_channels():
            dead[monitor.name] = description
    worst = sorted(saturated, key=lambda name: -saturated[name])[:WORST]
    return {"saturated_ranges": {name: saturated[name] for name in worst}, "dead_ranges": dead}


@contextmanager
def monitor_ranges(prepared: GraphModule, signature: Signature) -> Iterator[list[RangeMonitor]]:
    """Monitor what a prepared graph's activation observers see, until the end of the block."""
    monitors: list[RangeMonitor] = []
    known = set()
    name_inputs_(prepared, signature)
    with ExitStack() as stack:
        for node, observer in observers_in(prepared):
            source = observed(node)
            if id(observer) in known:  # several nodes may share an observer
                continue
            known.add(id(observer))
            monitor = RangeMonitor(observer, source, module_or_tensor(source))
            stack.enter_context(monitor.attached())
            if source.op != "get_attr":  # weights are checked, not reported
                monitors.append(monitor)
        yield monitors


def fit_ranges_(prepared: GraphModule) -> None:
    """Widen weight ranges whose bias would overflow int32; StageFailed where a scale vanishes."""
    for node, largest in vanishing_ranges(prepared):
        observer = observer_of(prepared, node)
        steps = observer.quant_max - observer.quant_min
        raise StageFailed(
            f"calibration: {describe_tensor(observed(node))} is {largest:.2g} at most, too "
            f"small for {steps.bit_length()} bits; expected {steps * SMALLEST_SCALE:.2g} or "
            "more; rescale the data or the weights"
        )
    # A bias has the scale `input_scale * weight_scale`. Where that is so small that the bias
    # overflows, the products are negligible beside it, so the channel's weights may be coarser.
    for source_node, weight_node, bias_node in quantized_biases(prepared):
        scale, _ = observer_of(prepared, source_node).calculate_qparams()
        weight = observer_of(prepared, weight_node)
        least_O = smallest_weight_scale(value_of(prepared, observed(bias_node)), scale)
        weight.max_val = torch.maximum(weight.max_val, least_O * weight.quant_max)


def vanishing_ranges(prepared: GraphModule) -> Iterator[tuple[Node, float]]:
    """Yield observers whose range is too small for its scale, and its largest absolute value."""
    for node, observer in observers_in(prepared):
        if not hasattr(observer, "max_val"):  # a bias's scale is derived
            continue
        largest = max(float(observer.min_val.abs().max()), float(observer.max_val.abs().max()))
        scale, _ = observer.calculate_qparams()
        if largest > 0 and float(scale.max()) <= SMALLEST_SCALE:
            yield node, largest


def quantized_biases(prepared: GraphModule) -> Iterator[tuple[Node, Node, Node]]:
    """Yield the observer nodes of input, weight and bias of each layer whose bias is quantized."""
    for node in prepared.graph.nodes:
        bias = node.args[2] if node.target in WEIGHTED and len(node.args) > 2 else None
        if isinstance(bias, Node) and bias.op == "call_module":
            yield (*node.args[:2], bias)


def smallest_weight_scale(bias_O: torch.Tensor, input_scale: torch.Tensor) -> torch.Tensor:
    """Return the smallest scale of each channel's weights with which its bias fits int32."""
    return bias_O.abs() / (input_scale * LARGEST_BIAS)


def observers_in(prepared: GraphModule) -> Iterator[tuple[Node, Any]]:
    """Yield the nodes that call observers, and these; several nodes may share an observer."""
    for node in prepared.graph.find_nodes(op="call_module"):
        yield node, observer_of(prepared, node)


def observer_of(prepared: GraphModule, node: object) -> MinMaxObserver:
    """Return the observer that a `call_module` node of a prepared graph calls."""
    return prepared.get_submodule(str(cast("Node", node).target))


def observed(node: Node) -> Node:
    """Return the input of an observer's node."""
    return cast("Node", node.args[0])


def require_finite(values: torch.Tensor, name: str) -> None:
    """Refuse NaN and infinity with StageFailed."""
    if not torch.isfinite(values).all():
        raise StageFailed(
            f"calibration: {name} is NaN or infinite, expected finite numbers; mend the data or "
            "the weights"
        )


def _layer_before_clamp(node: Node) -> Node:
    """Return the operator whose output a fused activation clamps, else the node itself."""
    return cast("Node", node.args[0]) if node.target in CLAMPS else node


def module_or_tensor(node: Node) -> str:
    """Name the user's module whose layer makes a tensor; else describe the tensor."""
    layer = _layer_before_clamp(node)
    return (layer.target in WEIGHTED and module_of(layer)) or describe_tensor(node)


def layers_of(prepared: GraphModule) -> list[Node]:
    """Return the convolutions and linear layers whose weight and bias no other node reads."""

    def is_unshared(operand: Any) -> bool:
        constant = skip_observers(operand)
        return not is_constant(constant) or len(readers_of(prepared, constant)) == 1

    return [
        node
        for node in prepared.graph.nodes
        if node.target in WEIGHTED
        if is_constant(skip_observers(node.args[1]))
        if all(map(is_unshared, node.args[1:3]))
    ]


def skip_observers(operand: Any) -> Any:
    """Return the node that an operand observes, through any number of observers."""
    while getattr(operand, "op", None) == "call_module":
        operand = operand.args[0]
    return operand


def weight_of(prepared: GraphModule, layer: Node) -> torch.Tensor:
    """Return a layer's weight."""
    return value_of(prepared, skip_observers(layer.args[1]))


def bias_of(prepared: GraphModule, layer: Node) -> torch.Tensor | None:
    """Return a layer's bias, or None."""
    bias = skip_observers(layer.args[2]) if len(layer.args) > 2 else None
    return value_of(prepared, bias) if is_constant(bias) else None


def set_weight_(prepared: GraphModule, layer: Node, weight: torch.Tensor) -> None:
    """Replace a layer's weight."""
    replace_value_(prepared, skip_observers(layer.args[1]), weight)
