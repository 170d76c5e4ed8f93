"""The user's layers in a float module and in the graph that was quantized from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx
from torch.nn.modules.batchnorm import _BatchNorm

from compress.common.forward import flatten_outputs
from compress.quantization.pt2e.module_names import module_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import nn

    from compress.quantization.numeric_debug.sqnr import Deviation

LayerCall = tuple[str, int]
"""A module's name, and how many times it was called before in the same run."""


def layer_calls(graph: fx.GraphModule, module: nn.Module) -> dict[fx.Node, LayerCall]:
    """Return the node that ends each call of a module which holds a weight (two axes and more)."""
    weighted = {
        name
        for name, part in module.named_modules()
        if any(p.dim() > 1 for p in part.parameters(recurse=False))
    }
    ends: dict[str, tuple[fx.Node, str]] = {}
    for node in graph.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        for name, call in zip(reversed(module_names(node)), reversed(stack), strict=False):
            if name in weighted:
                ends[call] = node, name
    calls: Counter[str] = Counter()
    layers: dict[fx.Node, LayerCall] = {}
    for node, name in ends.values():
        layers[node] = name, calls[name]
        calls[name] += 1
    return layers


class LayerOutputRecorder:
    """A float module that shows what its layers give, and can be given other results for them."""

    def __init__(
        self, module: nn.Module, names: Collection[str], unfolded: Collection[str]
    ) -> None:
        """Listen to a module.

        Args:
            module: a module in eval mode.
            names: the layers that are listened to.
            unfolded: modules that the quantized model has too; a BatchNorm that is not among them
                was folded into the layer before.
        """
        self.module = module
        self.values: dict[LayerCall, torch.Tensor] = {}
        """What each call of a layer gave in the last run, its folded BatchNorm included."""
        self._given: Mapping[LayerCall, torch.Tensor] = {}
        self._calls: Counter[str] = Counter()
        self._latest: tuple[LayerCall, torch.Tensor] | None = None
        for name, part in module.named_modules():
            if name in names:
                part.register_forward_hook(self._layer_hook(name))
            elif isinstance(part, _BatchNorm) and name not in unfolded:
                part.register_forward_hook(self._norm_hook)

    def __call__(
        self, *inputs: torch.Tensor, given: Mapping[LayerCall, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the answers; layers in `given` give those results instead of their own."""
        self.values, self._latest, self._given = {}, None, given or {}
        self._calls.clear()
        return flatten_outputs(self.module(*inputs))

    def _layer_hook(self, name: str) -> Any:
        def hook(part: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
            call = name, self._calls[name]
            self._calls[name] += 1
            return self._take(call, output) if isinstance(output, torch.Tensor) else None

        return hook

    def _norm_hook(self, part: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> Any:
        if self._latest is not None and inputs and inputs[0] is self._latest[1]:
            return self._take(self._latest[0], output)
        return None

    def _take(self, call: LayerCall, output: torch.Tensor) -> torch.Tensor:
        output = self._given.get(call, output)
        self._latest = call, output
        self.values[call] = output.clone()  # an activation in place may write over it
        return output


class Followed(Protocol):
    """A quantized model whose layers can be held against the float model's."""

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        expected: Mapping[LayerCall, torch.Tensor],
        found: dict[str, Deviation],
        *,
        given: bool,
    ) -> Any:
        """Return the answers, and add up how far the layers are from what is expected.

        Args:
            inputs: a batch.
            expected: what the float model gives in each call of a layer.
            found: where deviations are added up, by module.
            given: whether the model goes on with what the float model gives, so that each layer
                loses only what it loses itself.
        """
        ...


@dataclass(frozen=True)
class GraphLayerOutputs:
    """A graph followed through its operators."""

    graph: fx.GraphModule
    layers: Mapping[fx.Node, LayerCall]
    """Its nodes that end a layer."""

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        expected: Mapping[LayerCall, torch.Tensor],
        found: dict[str, Deviation],
        *,
        given: bool,
    ) -> Any:
        """Return the answers, and add up how far the layers are from what is expected."""
        return _Following(self.graph, self.layers, expected, found, given).run(*inputs)


class _Following(fx.Interpreter):
    def __init__(
        self,
        graph: fx.GraphModule,
        layers: Mapping[fx.Node, LayerCall],
        expected: Mapping[LayerCall, torch.Tensor],
        found: dict[str, Deviation],
        given: bool,
    ) -> None:
        super().__init__(graph)
        self.layers, self.expected, self.found, self.given = layers, expected, found, given

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and compare its result where it ends a layer."""
        value = super().run_node(n)
        call = self.layers.get(n)
        expected = self.expected.get(call) if call else None
        if call is None or expected is None or not _is_comparable(value, expected):
            return value
        self.found[call[0]].add(expected, value)
        return expected.to(value.dtype) if self.given else value


def _is_comparable(value: Any, expected: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == expected.shape
