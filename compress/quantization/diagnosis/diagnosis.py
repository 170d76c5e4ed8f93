"""Which layers of a quantized model lose accuracy, and what is measured of each.

Letters: C channels, N all values of a channel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from compress.common.forward import torch_predictor
from compress.core.diagnosis.layer_diagnosis import LayerDiagnosis
from compress.quantization.diagnosis.rounding_switches import ALL, RoundingSwitch, SwitchedGraph
from compress.quantization.numeric_debug.activation_tap import NodeTap, sample_rows
from compress.quantization.numeric_debug.sqnr import LARGEST_DB, Deviation
from compress.quantization.pt2e.observers import Histogram
from compress.quantization.pt2e.quantizer import CONVOLUTIONS
from compress.quantization.stages.base import FIDELITY

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from compress.core.val_halves import HalfOfVal
    from compress.data.batch import Batch
    from compress.quantization.diagnosis.rounding_switches import Rounded

EVIDENCE_SAMPLES, EVIDENCE_BATCH = 128, 32
"""Samples on which layers are measured, and how many of them at once."""
CALIBRATION_BATCHES = 4
"""Batches of the calibration sample of which the middle values are measured."""
CHANNEL_QUANTILE = 0.95
"""The range of a channel leaves out its largest values: a few outliers are another cause."""
MAX_VALUES = 4096
"""Values of a channel in a batch of which quantiles are taken."""


@dataclass(eq=False)
class QuantizationDiagnosis(LayerDiagnosis):
    """A model of `quantize_static` with a switch at each rounding."""

    weights_returned: dict[tuple[str, ...], float] = field(default_factory=dict, init=False)
    """Layers → the share of the loss that returned with their weights in float."""

    @cached_property
    def switched(self) -> SwitchedGraph:
        """The stage's graph, calibrated again."""
        return SwitchedGraph.from_prepared(self.stage.prepare(self.model, self.context)[0])

    @cached_property
    def evidence(self) -> dict[str, LayerEvidence]:
        """What was measured of each layer, on samples of `val`."""
        size = self.model.signature.smallest_batch
        batch_size = EVIDENCE_BATCH if size == 1 else size
        batches = self.halves[0].data.batches("val", batch_size, EVIDENCE_SAMPLES)
        # A graph of a fixed batch takes no shorter one.
        filled = (batch for batch in batches if len(batch) % size == 0)
        return collect_evidence(self.switched, filled, self.context.seed)

    @cached_property
    def calibrated(self) -> dict[str, LayerEvidence]:
        """What each layer reads of the calibration sample."""
        batches = self.stage.calibration_data(self.model, self.context)
        return collect_inputs(self.switched, islice(batches, CALIBRATION_BATCHES))

    def ranked_parts(self) -> list[str]:
        """Return the layers, those first whose error changes the outputs most."""
        # Where no gradient reaches a layer, its own noise is all that is known.
        return sorted(
            self.switched.layers,
            key=lambda name: (-self.evidence[name].effect, self.evidence[name].own.sqnr_db),
        )

    def drop_on(
        self, half: HalfOfVal, layers: Collection[str], rounds: Collection[Rounded] = ALL
    ) -> float:
        """Return the points lost with some layers, or some of their operands, in float."""
        with (
            self.switched.in_float(layers, rounds) as graph,
            torch_predictor(graph, "cpu", self.context.threads) as predict,
        ):
            return self.evaluate(half, predict)

    def own_sqnr_db(self, layer: str) -> float:
        """Return what was measured of the layer."""
        return round(self.evidence[layer].own.sqnr_db, 1)


@dataclass(eq=False)
class RequantizationDiagnosis(LayerDiagnosis):
    """A model of a stage that is run again for each set of layers, with these in `exclude`."""

    known: dict[str, float] = field(default_factory=dict, init=False)
    """Other settings → the points lost with them."""

    @cached_property
    def fidelity(self) -> dict[str, float]:
        """Layer → the signal to noise ratio that the stage has recorded, the worst first."""
        recorded: Any = self.after.manifest.facts[FIDELITY]
        return {layer["module"]: layer["own_sqnr_db"] for layer in recorded["layers"]}

    def ranked_parts(self) -> list[str]:
        """Return the layers by what the stage has recorded; float ones have no error."""
        return [name for name, value in self.fidelity.items() if value < LARGEST_DB]

    def drop_with(self, settings: dict[str, Any]) -> float:
        """Return the points lost with other settings of the stage, measured once."""
        key = str(settings)
        if key not in self.known:
            self.known[key] = self._run(self.halves[0], settings)
        return self.known[key]

    def own_sqnr_db(self, layer: str) -> float:
        """Return what the stage has recorded."""
        return round(self.fidelity[layer], 1)

    def drop_on(self, half: HalfOfVal, layers: Collection[str]) -> float:
        """Return the points lost with some layers in float."""
        if len(layers) == len(self.ranked_parts()):
            return 0.0  # the float model, whose score is that which is compared with
        return self._run(half, {"exclude": [*self.stage.exclude, *layers]})

    def _run(self, half: HalfOfVal, settings: dict[str, Any]) -> float:
        with self.context.in_temporary_folder() as context:
            made = self.stage.with_settings(settings).run(self.model, context)
            with made.open("cpu", self.context.threads) as predict:
                return self.evaluate(half, predict)


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
        self.lows = _combined(torch.minimum, self.lows, values_CN.amin(1))
        self.highs = _combined(torch.maximum, self.highs, values_CN.amax(1))
        sample_CN = sample_rows(values_CN, MAX_VALUES, axis=1)
        spread_C = sample_CN.abs().float().quantile(CHANNEL_QUANTILE, dim=1)
        self.spreads = _combined(torch.add, self.spreads, spread_C)

    def add_error(self, expected: torch.Tensor, actual: torch.Tensor, axis: int) -> None:
        """Add a batch of the layer's output, in float and with rounded operands."""
        self.own.add(expected, actual)
        error_CN = (actual - expected).double().movedim(axis, 0).flatten(1)
        self.errors = _combined(torch.add, self.errors, error_CN.sum(1))
        squares_C = error_CN.square().sum(1)
        self.squared_errors = _combined(torch.add, self.squared_errors, squares_C)
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
        low, high = self.extremes()
        inner = self.inner_width()
        return float(high - low) / inner if inner > 0 else 1.0

    def share_outside(self, low: float, high: float) -> float:
        """Return the share of the values outside of a range, by more than rounding explains."""
        # The ends of a range of 255 steps are rounded to a step's fraction.
        slack = 1e-3 * (high - low)
        below, up_to = self.values.count_below(torch.tensor([low - slack, high + slack])).tolist()
        own_low, own_high = map(float, self.extremes())
        total = self.values.total
        below = 0.0 if own_low >= low - slack else below
        up_to = float(total) if own_high <= high + slack else up_to
        return 1 - (up_to - below) / total if total else 0.0

    def extremes(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the smallest and the largest value, zero included."""
        if self.lows is None or self.highs is None:
            return torch.zeros(()), torch.zeros(())
        return self.lows.min().clamp(max=0), self.highs.max().clamp(min=0)

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


def _combined(
    combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    known: torch.Tensor | None,
    added: torch.Tensor,
) -> torch.Tensor:
    # A layer that is called with other numbers of channels counts as its first call.
    if known is None or known.shape != added.shape:
        return added if known is None else known
    return combine(known, added)


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


class _InputRun(NodeTap):
    """Runs the float graph, and adds up what each layer reads."""

    def __init__(self, switched: SwitchedGraph, found: dict[str, LayerEvidence]) -> None:
        self.names = {node: name for name, node in switched.operators.items()}
        super().__init__(switched.graph, self.names)
        self.found = found

    def observe(self, node: fx.Node, source: Any, output: Any) -> Any:
        if isinstance(source, torch.Tensor) and source.is_floating_point() and source.dim() > 1:
            axis = _channel_axis(node, source)
            self.found[self.names[node]].add_input(source.detach(), axis)
        return output


class _EvidenceRun(_InputRun):
    """Runs the float graph, and each layer once more with rounded operands."""

    def __init__(self, switched: SwitchedGraph, found: dict[str, LayerEvidence]) -> None:
        super().__init__(switched, found)
        self.probes: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def observe(self, node: fx.Node, source: Any, output: Any) -> Any:
        super().observe(node, source, output)
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        name = self.names[node]
        with torch.no_grad():
            operands = fx.map_arg((node.args, node.kwargs), self._rounded)
            rounded = self.call_function(node.target, *operands)
            self.found[name].add_error(output.detach(), rounded, _channel_axis(node, output))
            error = rounded - output.detach()
        # Zeros whose gradient is that of the model's outputs by this one.
        probe = torch.zeros_like(output, requires_grad=True)
        self.probes.append((name, probe, error))
        return output + probe

    def _rounded(self, operand: fx.Node) -> Any:
        value = self.env[operand]
        if operand.op == "call_module":
            switch = self.module.get_submodule(str(operand.target))
            if isinstance(switch, RoundingSwitch):
                return switch.round(value.detach())
        return value


def _channel_axis(operator: fx.Node, values: torch.Tensor) -> int:
    """Return the axis of the channels of what an operator reads or writes."""
    of_images = operator.target in CONVOLUTIONS or values.dim() == 4
    return 1 if of_images else values.dim() - 1
