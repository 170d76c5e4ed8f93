"""What is measured of each layer of a switched graph: its own error, and the values that it reads.

Letters: C channels, N all values of a channel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from compress.quantization.diagnosis.rounding_switches import RoundingSwitch
from compress.quantization.numeric_debug.sqnr import Deviation
from compress.quantization.pt2e.observers import Histogram
from compress.quantization.pt2e.quantizer import CONVOLUTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from compress.data.batch import Batch
    from compress.quantization.diagnosis.rounding_switches import SwitchedGraph

CHANNEL_QUANTILE = 0.95
"""The range of a channel leaves out its largest values: a few outliers are another cause."""
MOST_VALUES = 4096
"""Values of a channel in a batch of which quantiles are taken."""


@dataclass
class LayerEvidence:
    """What one layer reads, and what rounding its operands alone changes in its output."""

    own: Deviation = field(default_factory=Deviation)
    """Of the output, with float inputs."""
    effect: float = 0.0
    """First-order estimate of the squared change of the model's outputs."""
    values: Histogram = field(default_factory=Histogram)
    """Of the activation that it reads."""
    lows: torch.Tensor | None = None
    """Smallest value of each channel that it reads, `(C,)`; the others likewise."""
    highs: torch.Tensor | None = None
    trailing: int = 0
    """Axes of what it reads that follow the channels'."""
    spreads: torch.Tensor | None = None
    """Sum over batches of the 95 % quantile of each channel's absolute values."""
    errors: torch.Tensor | None = None
    """Sum of the error of each channel that it writes."""
    squared_errors: torch.Tensor | None = None
    error_count: int = 0
    """Errors of one channel."""

    def add_input(self, values: torch.Tensor, axis: int) -> None:
        """Add a batch of what the layer reads."""
        self.values.add_(values)
        self.trailing = values.dim() - 1 - axis
        values_CN = values.movedim(axis, 0).flatten(1)
        low_C, high_C = values_CN.amin(1), values_CN.amax(1)
        if self.lows is None or self.highs is None:
            self.lows, self.highs = low_C, high_C
        elif self.lows.shape == low_C.shape:
            self.lows = torch.minimum(self.lows, low_C)
            self.highs = torch.maximum(self.highs, high_C)
        if values_CN.shape[1] > MOST_VALUES:
            generator = torch.Generator().manual_seed(0)
            chosen = torch.randperm(values_CN.shape[1], generator=generator)[:MOST_VALUES]
            values_CN = values_CN[:, chosen]
        spread_C = values_CN.abs().float().quantile(CHANNEL_QUANTILE, dim=1)
        if self.spreads is None:
            self.spreads = spread_C
        elif self.spreads.shape == spread_C.shape:
            self.spreads = self.spreads + spread_C

    def add_error(self, expected: torch.Tensor, actual: torch.Tensor, axis: int) -> None:
        """Add a batch of the layer's output, in float and with rounded operands."""
        self.own.add(expected, actual)
        error_CN = (actual - expected).double().movedim(axis, 0).flatten(1)
        sums = error_CN.sum(1), error_CN.square().sum(1)
        if self.errors is None or self.squared_errors is None:
            self.errors, self.squared_errors = sums
        elif self.errors.shape == sums[0].shape:
            self.errors, self.squared_errors = (
                self.errors + sums[0],
                (self.squared_errors + sums[1]),
            )
        self.error_count += error_CN.shape[1]

    def channel_ratio(self) -> float:
        """Return by how many times the widest channel's range exceeds the median one's."""
        if self.spreads is None:
            return 1.0
        alive = self.spreads[self.spreads > 0]
        return float(alive.max() / alive.median()) if len(alive) > 1 else 1.0

    def inner_width(self) -> float:
        """Return the width of the range of all but a thousandth of the values, zero included."""
        low, high = self.values.quantiles(0.0005, 0.9995)
        return max(float(high), 0.0) - min(float(low), 0.0)

    def outlier_ratio(self) -> float:
        """Return by how many times a thousandth of the values widens the range."""
        low, high = self._extremes()
        inner = self.inner_width()
        return (high - low) / inner if inner > 0 else 1.0

    def share_outside(self, low: float, high: float) -> float:
        """Return the share of the values outside of a range, by more than rounding explains."""
        slack = 1e-3 * (high - low)
        below, up_to = self.values.count_below(torch.tensor([low - slack, high + slack])).tolist()
        own_low, own_high = self._extremes()
        total = self.values.total
        below = 0.0 if own_low >= low - slack else below
        up_to = float(total) if own_high <= high + slack else up_to
        return 1 - (up_to - below) / total if total else 0.0

    def extremes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the smallest and the largest value, zero included."""
        low, high = self._extremes()
        return torch.tensor(low), torch.tensor(high)

    def channel_ranges(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the smallest and the largest value of each channel, to be spread over a batch."""
        if self.lows is None or self.highs is None:
            return None
        shape = (-1, *[1] * self.trailing)
        return self.lows.view(shape), self.highs.view(shape)

    def shift(self) -> float:
        """Return the mean error of the output's channels, as a share of its deviation."""
        if self.errors is None or self.squared_errors is None or not self.error_count:
            return 0.0
        mean_C = self.errors / self.error_count
        variance_C = (self.squared_errors / self.error_count - mean_C.square()).clamp(min=0)
        spread = float(variance_C.mean().sqrt())
        bias = float(mean_C.square().mean().sqrt())
        return bias / spread if spread > 0 else 0.0

    def _extremes(self) -> tuple[float, float]:
        if self.lows is None or self.highs is None:
            return 0.0, 0.0
        return min(float(self.lows.min()), 0.0), max(float(self.highs.max()), 0.0)


def collect_evidence(
    switched: SwitchedGraph, batches: Iterable[Batch], seed: int = 0
) -> dict[str, LayerEvidence]:
    """Run batches through a graph in float, and measure each layer's own error and its effect.

    The effect of an error `e` of a layer's output on the model's outputs is `J e`, with the
    Jacobian `J`. For a random vector `v` of signs, the mean of `(vᵀ J e)²` is its squared length,
    and one backward pass gives `vᵀ J` for all layers.
    """
    found = {name: LayerEvidence() for name in switched.layers}
    generator = torch.Generator().manual_seed(seed)
    with switched.in_float(switched.layers), torch.enable_grad():
        for batch in batches:
            run = _EvidenceRun(switched, found)
            outputs = run.run(*batch.inputs)
            flat = outputs if isinstance(outputs, tuple | list) else [outputs]
            objective: Any = 0.0
            for output in flat:
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
                    objective = objective + (signs * output).sum()
            if isinstance(objective, torch.Tensor):
                torch.autograd.backward(objective)
            for name, probe, error in run.probes:
                if probe.grad is not None:
                    rows = (probe.grad * error).flatten(1).sum(1) if error.dim() > 1 else error
                    found[name].effect += float(rows.double().square().sum())
    return found


def collect_inputs(switched: SwitchedGraph, batches: Iterable[Batch]) -> dict[str, LayerEvidence]:
    """Run batches through a graph in float, and measure what each layer reads alone."""
    found = {name: LayerEvidence() for name in switched.layers}
    with switched.in_float(switched.layers), torch.no_grad():
        for batch in batches:
            _InputRun(switched, found).run(*batch.inputs)
    return found


class _InputRun(fx.Interpreter):
    """Runs the float graph, and adds up what each layer reads."""

    def __init__(self, switched: SwitchedGraph, found: dict[str, LayerEvidence]) -> None:
        super().__init__(switched.graph)
        self.found = found
        self.names = {node: name for name, node in switched.operators.items()}

    def run_node(self, n: fx.Node) -> Any:
        name, source = self.names.get(n), n.args[0] if n.args else None
        if name is not None and isinstance(source, fx.Node):
            read = self.env[source]
            is_float = isinstance(read, torch.Tensor) and read.is_floating_point()
            if is_float and read.dim() > 1:
                self.found[name].add_input(read.detach(), _channel_axis(n, read))
        return super().run_node(n)


class _EvidenceRun(_InputRun):
    """Runs the float graph, and each layer once more with rounded operands."""

    def __init__(self, switched: SwitchedGraph, found: dict[str, LayerEvidence]) -> None:
        super().__init__(switched, found)
        self.probes: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        name = self.names.get(n)
        if name is None or not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        evidence = self.found[name]
        with torch.no_grad():
            rounded = super().call_function(n.target, *self._rounded_arguments(n))
            evidence.add_error(value.detach(), rounded, _channel_axis(n, value))
            error = rounded - value.detach()
        probe = torch.zeros_like(value, requires_grad=True)
        self.probes.append((name, probe, error))
        return value + probe

    def _rounded_arguments(self, n: fx.Node) -> tuple[Any, Any]:
        def operand(node: fx.Node) -> Any:
            value = self.env[node]
            if node.op == "call_module":
                switch = self.module.get_submodule(str(node.target))
                if isinstance(switch, RoundingSwitch):
                    return switch.round(value.detach())
            return value

        return fx.map_arg(n.args, operand), fx.map_arg(n.kwargs, operand)


def _channel_axis(operator: fx.Node, values: torch.Tensor) -> int:
    """Return the axis of the channels of what an operator reads or writes."""
    of_images = operator.target in CONVOLUTIONS or values.dim() == 4
    return 1 if of_images else values.dim() - 1
