"""Which layers of a quantized model lose accuracy, and what is measured of each.

Putting a layer back to float alone tells what it costs, and needs no conversion: every place where
the integer graph rounds has a switch, which belongs to the layer that reads the rounded value.
Letters: C channels, N all values of a channel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import fx, nn

from compress.common.forward import torch_predictor
from compress.core.diagnosis.layer_diagnosis import LayerDiagnosis
from compress.quantization.numeric_debug.sqnr import LARGEST_DB, Deviation
from compress.quantization.pt2e.graph_capture import NodeTap, fake_quantize, module_of, sample_rows
from compress.quantization.pt2e.observer_ranges import observed, observer_of, skip_observers
from compress.quantization.pt2e.observers import Histogram
from compress.quantization.pt2e.quantizer import CLAMPS, CONVOLUTIONS, EMBEDDING, WEIGHTED
from compress.quantization.stages.base import FIDELITY

if TYPE_CHECKING:
    from compress.core.val_halves import HalfOfVal
    from compress.data.batch import Batch

EVIDENCE_SAMPLES, EVIDENCE_BATCH = 128, 32
"""Samples on which layers are measured, and how many of them at once."""
CALIBRATION_BATCHES = 4  # batches of the calibration sample of which the middle values are measured
CHANNEL_QUANTILE = 0.95
"""The range of a channel leaves out its largest values: a few outliers are another cause."""
MAX_VALUES = 4096  # values of a channel in a batch of which quantiles are taken

Rounded = Literal["activation", "weight", "bias"]
ALL: tuple[Rounded, ...] = ("activation", "weight", "bias")
OPERAND: dict[int, Rounded] = {1: "weight", 2: "bias"}
"""What the operands of a layer are, by position; the first is an activation."""


class RoundingSwitch(nn.Module):
    """Rounds a tensor to the integers of an observer while it is on."""

    def __init__(self, observer: Any, rounds: Rounded, *, is_constant: bool) -> None:
        """Take the range of a calibrated observer; a constant is rounded once."""
        super().__init__()
        self.observer, self.rounds, self.is_constant = observer, rounds, is_constant
        self.is_on = True
        self.low_high: tuple[torch.Tensor, torch.Tensor] | None = None
        """Ends of another range than the observer's, to find out what it would cost; of each
        channel, where they have the shape of one."""
        self._rounded: torch.Tensor | None = None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values, rounded while the switch is on."""
        return self.round(values) if self.is_on else values

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """Return the rounded values, whether the switch is on or not."""
        if self.is_constant:
            if self._rounded is None:
                self._rounded = fake_quantize(self.observer, values)
            return self._rounded
        low, high = self.observer.quant_min, self.observer.quant_max
        scale, zero = self.observer.calculate_qparams()
        if self.low_high is not None:
            least, largest = self.low_high
            least, largest = least.clamp(max=0), largest.clamp(min=0)
            scale = ((largest - least) / (high - low)).clamp(min=torch.finfo(torch.float32).tiny)
            # `tiny`: the scale of an empty range would be 0, and all values NaN.
            zero = low - (least / scale).round()
        rounded: torch.Tensor = ((values / scale + zero).round_().clamp_(low, high) - zero) * scale
        return rounded

    def observed_range(self) -> tuple[float, float]:
        """Return the smallest and the largest value of the calibration sample."""
        return float(self.observer.min_val.min()), float(self.observer.max_val.max())

    def chosen_range(self) -> tuple[float, float]:
        """Return the values that the smallest and the largest integer stand for."""
        scale, zero = (float(part) for part in self.observer.calculate_qparams())
        ends = self.observer.quant_min, self.observer.quant_max
        return (ends[0] - zero) * scale, (ends[1] - zero) * scale


@dataclass
class SwitchedGraph:
    """A calibrated graph with a switch before each operator that reads rounded numbers."""

    graph: fx.GraphModule
    switches: dict[str, list[RoundingSwitch]]
    """Layer → its switches, in graph order. An operator without weights, such as an addition, is a
    layer of its own: `add of layers.3`."""
    operators: dict[str, fx.Node]
    """Layer → the operator that reads what these switches round; a layer that is called more than
    once has its first."""
    modules: dict[str, str] = field(default_factory=dict)
    """Layer → the user's module, as `exclude` takes it; of layers with weights alone."""

    @classmethod
    def from_prepared(cls, prepared: fx.GraphModule) -> SwitchedGraph:
        """Replace the observers of a calibrated graph, which is changed, by switches."""
        switches: dict[str, list[RoundingSwitch]] = defaultdict(list)
        operators: dict[str, fx.Node] = {}
        modules: dict[str, str] = {}
        observers = [node for node in prepared.graph.nodes if node.op == "call_module"]
        for node in observers:
            source = skip_observers(node)
            is_constant, observer = source.op == "get_attr", observer_of(prepared, node)
            for reader in list(node.users):
                if reader in observers:  # of other bits: its own switch rounds
                    continue
                operator, rounds = _operator_and_operand(reader, node)
                name = _layer_name(operator)
                switch = RoundingSwitch(observer, rounds, is_constant=is_constant)
                target = f"rounding_{sum(map(len, switches.values()))}"
                prepared.add_submodule(target, switch)
                with prepared.graph.inserting_before(reader):
                    call = prepared.graph.call_module(target, (observed(node),))
                call.meta = dict(source.meta)
                reader.replace_input_with(node, call)
                switches[name].append(switch)
                operators.setdefault(name, operator)
                if operator.target in {*WEIGHTED, EMBEDDING} and module_of(operator):
                    modules[name] = module_of(operator)
        for node in reversed(observers):
            for reader in list(node.users):
                reader.replace_input_with(node, observed(node))
            prepared.graph.erase_node(node)
        prepared.recompile()
        # Switches were made in the order of observers; messages name layers in that of the graph.
        places = {node: i for i, node in enumerate(prepared.graph.nodes)}
        order = sorted(switches, key=lambda name: places[operators[name]])
        return cls(prepared, {name: switches[name] for name in order}, operators, modules)

    @property
    def layers(self) -> tuple[str, ...]:
        """All layers that round something, in graph order."""
        return tuple(self.switches)

    @contextmanager
    def in_float(
        self, layers: Collection[str], rounds: Collection[Rounded] = ALL
    ) -> Iterator[fx.GraphModule]:
        """Provide the graph with some layers in float; or only their operands in `rounds`."""
        off = [s for name in layers for s in self.switches[name] if s.rounds in rounds]
        for switch in off:
            switch.is_on = False
        try:
            yield self.graph
        finally:
            for switch in off:
                switch.is_on = True

    def activation_switches(self, layer: str) -> list[RoundingSwitch]:
        """Return the switches of what a layer reads; none where that is float anyway."""
        return [switch for switch in self.switches[layer] if switch.rounds == "activation"]


def _operator_and_operand(reader: fx.Node, node: fx.Node) -> tuple[fx.Node, Rounded]:
    """Return the operator that a rounded value belongs to, and what it is to it."""
    if reader.op == "output":  # belongs to what made it
        source = skip_observers(node)
        return (source.args[0] if source.target in CLAMPS else source), "activation"
    if reader.target in WEIGHTED:
        position = next(i for i, operand in enumerate(reader.args) if operand is node)
        return reader, OPERAND.get(position, "activation")
    return reader, "weight" if reader.target is EMBEDDING else "activation"


def _layer_name(operator: fx.Node) -> str:
    module = module_of(operator)
    if operator.target in {*WEIGHTED, EMBEDDING}:
        weight = operator.args[0 if operator.target is EMBEDDING else 1]
        return module or str(skip_observers(weight).target)
    kind = str(operator.target).split(".")[1] if "." in str(operator.target) else operator.name
    return f"{kind} of {module or 'the model'}"


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
        found = {name: LayerEvidence() for name in self.switched.layers}
        batches = self.stage.calibration_data(self.model, self.context)
        tap = _LayerTap(self.switched, found)
        with self.switched.in_float(self.switched.layers), torch.no_grad():
            for batch in islice(batches, CALIBRATION_BATCHES):
                tap.run(*batch.inputs)
        return found

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
        self.squared_errors = _combined(torch.add, self.squared_errors, error_CN.square().sum(1))
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
        ends = torch.tensor([low - slack, high + slack], dtype=torch.float64)
        return self.values.share_outside(ends, *self.extremes())

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
    run = _LayerTap(switched, found, rounds=True)
    with switched.in_float(switched.layers), torch.enable_grad():
        for batch in batches:
            outputs = run.run(*batch.inputs)
            objective: Any = 0.0
            for output in outputs if isinstance(outputs, tuple | list) else [outputs]:
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
                    objective = objective + (signs * output).sum()
            if isinstance(objective, torch.Tensor):
                torch.autograd.backward(objective)
            for name, probe, error in run.probes:
                if probe.grad is not None:
                    rows = (probe.grad * error).flatten(1).sum(1) if error.dim() > 1 else error
                    found[name].effect += float(rows.double().square().sum())
            # A tap is in a cycle with its method: what it holds would stay until it is collected.
            run.probes.clear()
            run.env.clear()
    return found


class _LayerTap(NodeTap):
    """Runs the float graph and adds up what each layer reads; if asked, also its own error."""

    def __init__(
        self, switched: SwitchedGraph, found: dict[str, LayerEvidence], *, rounds: bool = False
    ) -> None:
        self.names = {node: name for name, node in switched.operators.items()}
        super().__init__(switched.graph, self.names, self.observe)
        self.found, self.rounds = found, rounds
        self.probes: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def observe(self, node: fx.Node, source: Any, output: Any) -> Any:
        evidence = self.found[self.names[node]]
        if isinstance(source, torch.Tensor) and source.is_floating_point() and source.dim() > 1:
            evidence.add_input(source.detach(), _channel_axis(node, source))
        if not (self.rounds and isinstance(output, torch.Tensor) and output.is_floating_point()):
            return output
        with torch.no_grad():
            operands = fx.map_arg((node.args, node.kwargs), self._rounded)
            rounded = self.call_function(node.target, *operands)
            evidence.add_error(output.detach(), rounded, _channel_axis(node, output))
            error = rounded - output.detach()
        # Zeros whose gradient is that of the model's outputs by this one.
        probe = torch.zeros_like(output, requires_grad=True)
        self.probes.append((self.names[node], probe, error))
        return output + probe

    def _rounded(self, operand: fx.Node) -> Any:
        value = self.env[operand]
        if operand.op == "call_module":
            switch = self.module.get_submodule(str(operand.target))
            if isinstance(switch, RoundingSwitch):
                return switch.round(value.detach())
        return value


def _channel_axis(operator: fx.Node, values: torch.Tensor) -> int:
    return 1 if operator.target in CONVOLUTIONS or values.dim() == 4 else values.dim() - 1
