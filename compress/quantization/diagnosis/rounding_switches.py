"""A calibrated graph whose layers compute in floats or in rounded numbers, as they are switched.

Putting a layer back to float alone tells what it costs, and needs no conversion: every place where
the integer graph rounds has a switch, which belongs to the layer that reads the rounded value.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from compress.quantization.pt2e.graph_capture import module_of
from compress.quantization.pt2e.observer_ranges import observed, observer_of, skip_observers
from compress.quantization.pt2e.partial_graph import fake_quantize
from compress.quantization.pt2e.quantizer import CLAMPS, EMBEDDING, WEIGHTED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch.fx import GraphModule, Node

Rounded = Literal["activation", "weight", "bias"]
ALL: tuple[Rounded, ...] = ("activation", "weight", "bias")
OPERAND: dict[int, Rounded] = {1: "weight", 2: "bias"}
"""What the operands of a layer are, by position; the first is an activation."""


class RoundingSwitch(nn.Module):
    """Rounds a tensor to the integers of an observer while it is on."""

    scale: torch.Tensor
    zero_point: torch.Tensor

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
            known: torch.Tensor = self._rounded
            return known
        low, high = self.observer.quant_min, self.observer.quant_max
        scale, zero = self.observer.calculate_qparams()
        if self.low_high is not None:
            least, largest = self.low_high
            least, largest = least.clamp(max=0), largest.clamp(min=0)
            scale = ((largest - least) / (high - low)).clamp(min=torch.finfo(torch.float32).tiny)
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

    graph: GraphModule
    switches: dict[str, list[RoundingSwitch]]
    """Layer → its switches, in graph order. An operator without weights, such as an addition, is a
    layer of its own: `add of layers.3`."""
    operators: dict[str, Node]
    """Layer → the operator that reads what these switches round; a layer that is called more than
    once has its first."""
    modules: dict[str, str] = field(default_factory=dict)
    """Layer → the user's module, as `exclude` takes it; of layers with weights alone."""

    @classmethod
    def from_prepared(cls, prepared: GraphModule) -> SwitchedGraph:
        """Replace the observers of a calibrated graph, which is changed, by switches."""
        switches: dict[str, list[RoundingSwitch]] = defaultdict(list)
        operators: dict[str, Node] = {}
        modules: dict[str, str] = {}
        observers = [node for node in prepared.graph.nodes if node.op == "call_module"]
        for node in observers:
            source = skip_observers(node)
            for reader in list(node.users):
                if reader in observers:  # of other bits: its own switch rounds
                    continue
                operator, rounds = _operator_and_operand(reader, node)
                name = _layer_name(operator)
                is_constant = source.op == "get_attr"
                observer = observer_of(prepared, node)
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
    ) -> Iterator[GraphModule]:
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


def _operator_and_operand(reader: Node, node: Node) -> tuple[Node, Rounded]:
    """Return the operator that a rounded value belongs to, and what it is to it."""
    if reader.op == "output":  # belongs to what made it
        source = skip_observers(node)
        return (source.args[0] if source.target in CLAMPS else source), "activation"
    if reader.target is EMBEDDING:
        return reader, "weight"
    if reader.target in WEIGHTED:
        position = next(i for i, operand in enumerate(reader.args) if operand is node)
        return reader, OPERAND.get(position, "activation")
    return reader, "activation"


def _layer_name(operator: Node) -> str:
    module = module_of(operator)
    if operator.target in WEIGHTED:
        return module or str(skip_observers(operator.args[1]).target)
    if operator.target is EMBEDDING:
        return module or str(skip_observers(operator.args[0]).target)
    kind = str(operator.target).split(".")[1] if "." in str(operator.target) else operator.name
    return f"{kind} of {module or 'the model'}"
