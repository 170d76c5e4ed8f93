"""One float graph quantized again and again, each layer in a format of its own.

Tracing and calibration are done once: the range of an activation does not depend on which layers
are rounded, as observers look at the float model.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx

from compress.quantization.config.dtype_scheme import unsigned
from compress.quantization.pt2e.module_names import module_of
from compress.quantization.pt2e.observer_ranges import fit_ranges_
from compress.quantization.pt2e.observers import OBSERVERS
from compress.quantization.pt2e.qspec import spec_of
from compress.quantization.pt2e.quantizer import CLAMPS, LINEAR, WEIGHTED, OnnxRuntimeQuantizer
from compress.quantization.pt2e.torchao_api import Q_ANNOTATION_KEY
from compress.quantization.ptq.calibrate import (
    copied,
    integer_graph,
    observe_,
    prepare,
    traced,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from compress.common.signature import Signature
    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import Observer, Scheme

FLOAT, WIDE = "float", "uint16"
ROUNDS = 11
"""Runs of which the median time of a layer is taken."""


class MixedQuantizer(OnnxRuntimeQuantizer):
    """Annotates what onnxruntime fuses, and gives the layers that are named other formats."""

    def __init__(
        self,
        scheme: Scheme,
        observer: Observer,
        exclude: Sequence[str],
        floats: Iterable[str] = (),
        wides: Iterable[str] = (),
        *,
        embeddings: bool,
    ) -> None:
        """Choose the formats.

        Args:
            scheme: integer formats of activations and weights.
            observer: how the range of an activation is estimated.
            exclude: patterns of module names whose operators stay float.
            floats: layers that stay float, and no part of them alone.
            wides: layers that read 16 bits, and whose results stay float.
            embeddings: whether tables are rounded too.
        """
        super().__init__(scheme, observer, exclude, embeddings=embeddings)
        self.floats, self.wides = frozenset(floats), frozenset(wides)
        self.usual, self.wide = self.activation, spec_of(unsigned(16), OBSERVERS[observer])
        self.layers: list[str] = []
        """The layers that are quantized, in graph order, filled while annotating."""

    def _annotate_weighted(self, node: fx.Node) -> None:
        name = layer_name(node)
        if name not in self.floats:
            self.activation = self.wide if name in self.wides else self.usual
            super()._annotate_weighted(node)
            if Q_ANNOTATION_KEY in node.meta:
                self.layers += [] if name in self.layers else [name]
                self._keep_result_float_(node)
            self.activation = self.usual

    def _keep_result_float_(self, node: fx.Node) -> None:
        """Leave a product's result unrounded where no layer reads it in 8 bits, in place.

        A convolution's is rounded even then: without that onnxruntime does not fuse it. Where a
        layer reads 16 bits it fuses nothing anyway.
        """
        tail = next((r for r in node.users if r.target in CLAMPS and len(node.users) == 1), node)
        others = self.floats | self.wides
        if layer_name(node) in self.wides or (
            node.target is LINEAR
            and all(r.target in WEIGHTED and layer_name(r) in others for r in tail.users)
        ):
            tail.meta[Q_ANNOTATION_KEY].output_qspec = None


def layer_name(node: fx.Node) -> str:
    """Return the user's module that a convolution or product lies in, or else its weight."""
    weight: Any = node.args[1]
    return module_of(node) or str(weight.target)


@dataclass(frozen=True)
class Candidate:
    """A quantized graph."""

    graph: fx.GraphModule
    quantizer: MixedQuantizer


@dataclass
class Candidates:
    """Makes quantized graphs from a choice of formats."""

    graph: fx.GraphModule
    """The float graph; it is copied before anything is changed."""
    signature: Signature
    scheme: Scheme
    exclude: tuple[str, ...]
    embeddings: bool
    """Whether tables are rounded too."""
    ranges: dict[str, dict[str, tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    """Observer → activation → its smallest and largest number."""
    extremes: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Activation → its smallest and largest number, which 16 bits hold without being coarse."""
    layers: list[str] = field(default_factory=list)
    """All layers that can be quantized, in graph order."""

    @classmethod
    def of(
        cls,
        module: torch.nn.Module,
        signature: Signature,
        scheme: Scheme,
        exclude: tuple[str, ...],
        *,
        embeddings: bool,
    ) -> Candidates:
        """Trace a module in eval mode; it is not changed."""
        return cls(traced(module, signature), signature, scheme, exclude, embeddings)

    def observe(
        self, observer: str, batches: Iterable[Batch], report: Callable[[int], None]
    ) -> None:
        """Find the ranges of all activations with an observer; the first one is the usual one.

        Raises:
            StageFailed: nothing can be quantized, or the data does not fit the signature or is
                not finite.
        """
        quantizer = self._quantizer(cast("Observer", observer), {})
        prepared = prepare(self._copied(), quantizer)
        self.layers = quantizer.layers
        observe_(prepared, self.signature, batches, report)
        for name, seen, _ in _activation_observers(prepared):
            self.ranges.setdefault(observer, {})[name] = _range(seen)
            self.extremes.setdefault(name, (seen.min_val.clone(), seen.max_val.clone()))

    def build(self, formats: Mapping[str, str]) -> Candidate:
        """Return the graph with layers in the formats named; others have the usual observer.

        Args:
            formats: layer → the observer that gives the range of what it reads, `uint16` or
                `float`.
        """
        quantizer = self._quantizer("minmax", formats)
        prepared = prepare(self._copied(), quantizer)
        with torch.inference_mode():
            prepared(*self.signature.example())  # the weights' observers look when it is run
        usual = next(iter(self.ranges.values()))
        for name, observer, _ in _activation_observers(prepared):
            found = (self.extremes if observer.dtype is torch.uint16 else usual)[name]
            observer.min_val, observer.max_val = (limit.clone() for limit in found)
        for name, observer, readers in _activation_observers(prepared):
            # After the usual ranges: operators that only move values share one observer.
            for chosen in (formats.get(layer_name(r)) for r in readers if r.target in WEIGHTED):
                if chosen in self.ranges:
                    found = self.ranges[chosen][name]
                    observer.min_val, observer.max_val = (limit.clone() for limit in found)
        fit_ranges_(prepared)
        return Candidate(integer_graph(prepared), quantizer)

    def _copied(self) -> fx.GraphModule:
        """Return the float graph, with the same weights in memory."""
        return copied(self.graph, self.graph.state_dict(keep_vars=True).values())

    def _quantizer(self, observer: Observer, formats: Mapping[str, str]) -> MixedQuantizer:
        floats, wides = (
            [name for name, chosen in formats.items() if chosen == wanted]
            for wanted in (FLOAT, WIDE)
        )
        return MixedQuantizer(
            self.scheme, observer, self.exclude, floats, wides, embeddings=self.embeddings
        )

    def costs(self, kind: str, batches: Sequence[tuple[torch.Tensor, ...]]) -> dict[str, float]:
        """Return each layer's share of what all layers cost.

        Args:
            kind: `macs`, or `latency` for the median time of the float layer in PyTorch on this
                machine.
            batches: of one sample each.
        """
        costing = _Costing(self.graph)
        with torch.inference_mode():
            for inputs in islice(cycle(batches), ROUNDS if kind == "latency" else 1):
                costing.run(*inputs)
        if kind == "latency":
            found = {name: statistics.median(times) for name, times in costing.seconds()}
        else:
            found = dict(costing.macs)
        total = sum(found[name] for name in self.layers)
        return {name: found[name] / total for name in self.layers}


class _Costing(fx.Interpreter):
    """Runs a float graph, and counts and times its layers."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.macs: Counter[str] = Counter()
        self._runs: list[Counter[str]] = []

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._runs.append(Counter())
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        if n.target not in WEIGHTED:
            return super().run_node(n)
        began = time.perf_counter()
        result = super().run_node(n)
        name = layer_name(n)
        self._runs[-1][name] += time.perf_counter() - began  # type: ignore[assignment]
        _, weight, *_ = self.fetch_args_kwargs_from_env(n)[0]
        self.macs[name] += result.numel() * weight[0].numel()
        return result

    def seconds(self) -> Iterator[tuple[str, list[float]]]:
        """Yield each layer's times."""
        for name in self.macs:
            yield name, [run[name] for run in self._runs]


def _activation_observers(
    prepared: fx.GraphModule,
) -> Iterator[tuple[str, Any, list[fx.Node]]]:
    """Yield each observed activation's name, its observer, and who reads it."""
    for node in prepared.graph.nodes:
        if node.op == "call_module" and node.args[0].op != "get_attr":
            source = node.args[0]
            while source.op == "call_module":  # another observer of the same, in other bits
                source = source.args[0]
            yield source.name, prepared.get_submodule(node.target), list(node.users)


def _range(observer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the range that gives an observer of extremes the same scale and zero point."""
    scale, zero = observer.calculate_qparams()
    if observer.qscheme is torch.per_tensor_symmetric:
        half = (scale * (observer.quant_max - observer.quant_min) / 2).squeeze()
        return -half, half
    low, high = (scale * (limit - zero) for limit in (observer.quant_min, observer.quant_max))
    return low.squeeze(), high.squeeze()
