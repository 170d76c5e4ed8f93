"""Outputs of the user's layers, in the float module and in the graph quantized from it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.nn.modules.batchnorm import _BatchNorm

from compress.common.forward import flatten_outputs
from compress.quantization.pt2e.graph_capture import module_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import nn

    from compress.quantization.numeric_debug.sqnr import Deviation

LayerCall = tuple[str, int]
"""A module's name, and how many times it was called before in the same run."""


def layer_calls(graph: fx.GraphModule, module: nn.Module) -> dict[fx.Node, LayerCall]:
    """Return the last node of each call of a module that has a weight (two axes and more)."""
    weighted = {
        name
        for name, part in module.named_modules()
        if any(p.dim() > 1 for p in part.parameters(recurse=False))
    }
    last_nodes: dict[str, tuple[fx.Node, str]] = {}
    for node in graph.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        for name, call in zip(reversed(module_names(node)), reversed(stack), strict=False):
            if name in weighted:
                last_nodes[call] = node, name
    counts: Counter[str] = Counter()
    layers: dict[fx.Node, LayerCall] = {}
    for node, name in last_nodes.values():
        layers[node] = name, counts[name]
        counts[name] += 1
    return layers


class LayerOutputRecorder:
    """Runs a float module and records the output of its layers, with forward hooks."""

    def __init__(
        self, module: nn.Module, names: Collection[str], names_in_graph: Collection[str]
    ) -> None:
        """Register hooks on the layers `names`, which the module keeps."""
        self.module = module
        self.outputs: dict[LayerCall, torch.Tensor] = {}
        """Of each call of a layer in the last run."""
        self._counts: Counter[str] = Counter()
        self._latest: tuple[LayerCall, torch.Tensor] | None = None
        for name, part in module.named_modules():
            if name in names:
                part.register_forward_hook(partial(self._record_layer, name))
            # Folded into the layer before it: its output counts as that layer's.
            elif isinstance(part, _BatchNorm) and name not in names_in_graph:
                part.register_forward_hook(self._record_folded_norm)

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the module, and return its outputs."""
        self.outputs, self._latest = {}, None
        self._counts.clear()
        return flatten_outputs(self.module(*inputs))

    def _record_layer(self, name: str, part: nn.Module, inputs: Any, output: Any) -> None:
        call = name, self._counts[name]
        self._counts[name] += 1
        if isinstance(output, torch.Tensor):
            self._record(call, output)

    def _record_folded_norm(self, part: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self._latest is not None and inputs and inputs[0] is self._latest[1]:
            self._record(self._latest[0], output)

    def _record(self, call: LayerCall, output: torch.Tensor) -> None:
        self._latest = call, output
        self.outputs[call] = output.clone()  # an in-place activation may overwrite it


class LayerComparison(fx.Interpreter):
    """Runs a quantized graph and accumulates the deviation of its layers' outputs."""

    def __init__(
        self,
        graph: fx.GraphModule,
        layers: Mapping[fx.Node, LayerCall],
        expected: Mapping[LayerCall, torch.Tensor],
        deviations: dict[str, Deviation],
        *,
        replace: bool,
    ) -> None:
        """Prepare a run, which with `replace` continues with the float outputs after each layer.

        A layer's deviation is then its own error.
        """
        super().__init__(graph)
        self.layers, self.expected = layers, expected
        self.deviations, self.replace = deviations, replace

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and compare its output where it ends a layer."""
        value = super().run_node(n)
        call = self.layers.get(n)
        expected = self.expected.get(call) if call else None
        if call is None or expected is None:
            return value
        if not isinstance(value, torch.Tensor) or value.shape != expected.shape:
            return value
        self.deviations[call[0]].add(expected, value)
        return expected.to(value.dtype) if self.replace else value
