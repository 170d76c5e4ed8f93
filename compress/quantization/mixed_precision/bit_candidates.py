"""Build quantized graphs from one float graph, with a format for each layer, and name layers."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx

from compress.profiling.benchmark import CallTimer
from compress.quantization.config.dtype_scheme import unsigned_format
from compress.quantization.pt2e.graph_capture import (
    capture,
    copy_graph,
    is_excluded,
    module_of,
    value_of,
)
from compress.quantization.pt2e.observer_ranges import fit_ranges_, skip_observers
from compress.quantization.pt2e.observers import observer_class
from compress.quantization.pt2e.quantizer import (
    ADDITION,
    AVERAGE_POOL,
    CLAMPS,
    EMBEDDING,
    LINEAR,
    MOVES,
    WEIGHTED,
    OnnxRuntimeQuantizer,
    is_constant,
    protect_shared_layers_,
    qspec,
)
from compress.quantization.pt2e.torchao_api import Q_ANNOTATION_KEY, fuse_conv_bn_
from compress.quantization.ptq.calibrate import (
    calibrate_,
    convert,
    leave_float_,
    leave_vanishing_float_,
    prepare,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from compress.common.signature import Signature
    from compress.data.batch import Batch
    from compress.quantization.config.dtype_scheme import Observer, Scheme

    Range = tuple[torch.Tensor, torch.Tensor]
    from torch import nn

FLOAT, UINT16 = "float", "uint16"
TIMED_RUNS = 11
"""Runs of which the median time of a layer is taken."""


class MixedQuantizer(OnnxRuntimeQuantizer):
    """Annotates what onnxruntime fuses, except in layers that are given other formats."""

    def __init__(
        self,
        scheme: Scheme,
        observer: Observer,
        exclude: Sequence[str],
        float_layers: Iterable[str] = (),
        uint16_layers: Iterable[str] = (),
        *,
        embeddings: bool,
    ) -> None:
        """Choose the formats.

        `float_layers`, names and not patterns, stay float; `uint16_layers` read 16 bits and give
        floats.
        """
        super().__init__(scheme, observer, exclude, embeddings=embeddings)
        self.float_layers, self.uint16_layers = frozenset(float_layers), frozenset(uint16_layers)
        self.default = self.activation
        self.uint16 = qspec(unsigned_format(16), observer_class(observer))
        self.layers: list[str] = []
        """The layers that are quantized, in graph order, filled while annotating."""

    def _annotate_weighted(self, node: fx.Node) -> None:
        name = layer_name(node)
        if name in self.float_layers:
            return
        self.activation = self.uint16 if name in self.uint16_layers else self.default
        super()._annotate_weighted(node)
        self.activation = self.default
        if Q_ANNOTATION_KEY not in node.meta:
            return
        if name not in self.layers:
            self.layers.append(name)
        # An output that no layer reads in 8 bits stays float, but for a convolution's, without
        # which onnxruntime does not fuse it. With a 16-bit input it fuses nothing anyway.
        tail = next((r for r in node.users if r.target in CLAMPS and len(node.users) == 1), node)
        others = self.float_layers | self.uint16_layers
        if name in self.uint16_layers or (
            node.target is LINEAR
            and all(r.target in WEIGHTED and layer_name(r) in others for r in tail.users)
        ):
            tail.meta[Q_ANNOTATION_KEY].output_qspec = None


def layer_name(node: fx.Node) -> str:
    """Return the user's module of a convolution or linear layer, or else its weight's name."""
    weight: Any = node.args[1]
    return module_of(node) or str(weight.target)


@dataclass(frozen=True)
class Candidate:
    """A quantized graph, and the quantizer that annotated it."""

    graph: fx.GraphModule
    quantizer: MixedQuantizer


@dataclass
class CandidateBuilder:
    """Builds quantized graphs from a choice of formats."""

    # Captured and calibrated once: observers see the float model, so the range of an activation
    # does not depend on which layers are quantized.

    graph: fx.GraphModule
    """The float graph; it is copied before anything is changed. BatchNorms are folded once."""
    signature: Signature
    scheme: Scheme
    exclude: tuple[str, ...]
    embeddings: bool
    """Whether embedding tables are quantized too."""
    ranges: dict[str, dict[str, Range]] = field(default_factory=dict)
    """Observer → activation → the ends of its range."""
    extremes: dict[str, Range] = field(default_factory=dict)
    """Activation → its smallest and largest value; 16 bits need no narrower range."""
    layers: list[str] = field(default_factory=list)
    """All layers that can be quantized, in graph order."""
    vanishing: dict[str, float] = field(default_factory=dict)
    """Tensor too small for integers → its largest absolute value."""
    float_operators: frozenset[str] = frozenset()
    """Names of the nodes that read such tensors, and stay float whatever their format."""

    def __post_init__(self) -> None:
        self.graph = self._copy()
        protect_shared_layers_(self.graph)
        fuse_conv_bn_(self.graph)

    def calibrate(
        self, observer: str, batches: Iterable[Batch], report: Callable[[int], None]
    ) -> None:
        """Find the ranges of all activations with an observer; the first one is the default."""
        quantizer = self._quantizer(cast("Observer", observer), {})
        prepared = prepare(self._copy(), quantizer)
        calibrate_(prepared, self.signature, batches, report)
        for name, calibrated, _ in _activation_observers(prepared):
            scale, zero = calibrated.calculate_qparams()
            limits = calibrated.quant_min, calibrated.quant_max
            if calibrated.qscheme is torch.per_tensor_symmetric:
                half = (scale * (limits[1] - limits[0]) / 2).squeeze()
                ends = -half, half
            else:
                low, high = ((scale * (limit - zero)).squeeze() for limit in limits)
                ends = low, high
            # Extremes with which a `minmax` observer has the same scale and zero point.
            self.ranges.setdefault(observer, {})[name] = ends
            self.extremes.setdefault(name, (calibrated.min_val.clone(), calibrated.max_val.clone()))
        if not self.layers:
            self.vanishing, readers = leave_vanishing_float_(prepared, quantizer)
            self.float_operators = frozenset(node.name for node in readers)
            floats = {layer_name(node) for node in readers if node.target in WEIGHTED}
            self.layers = [name for name in quantizer.layers if name not in floats]

    def build(self, formats: Mapping[str, str]) -> Candidate:
        """Return the quantized graph in which some layers have another format than the default.

        That is an observer of the layer's input, `uint16` or `float`.
        """
        quantizer = self._quantizer("minmax", formats)
        prepared = prepare(self._copy(), quantizer)
        with torch.inference_mode():
            prepared(*self.signature.example())  # observers of weights see them when it runs
        defaults = next(iter(self.ranges.values()))
        for name, observer, _ in _activation_observers(prepared):
            ends = (self.extremes if observer.dtype is torch.uint16 else defaults)[name]
            observer.min_val, observer.max_val = (end.clone() for end in ends)
        # After the defaults, as operators that only move values share an observer.
        for name, observer, readers in _activation_observers(prepared):
            for chosen in (formats.get(layer_name(r)) for r in readers if r.target in WEIGHTED):
                if chosen in self.ranges:
                    ends = self.ranges[chosen][name]
                    observer.min_val, observer.max_val = (end.clone() for end in ends)
        readers = [n for n in prepared.graph.nodes if n.name in self.float_operators]
        leave_float_(prepared, quantizer, readers)
        fit_ranges_(prepared)
        return Candidate(convert(prepared), quantizer)

    def costs(self, kind: str, batches: Sequence[tuple[torch.Tensor, ...]]) -> dict[str, float]:
        """Return each layer's share of what all layers cost, on batches of one sample each.

        `kind` is `macs`, or `latency`: median time of the float layer in PyTorch on this machine.
        """
        profile = _LayerProfile(self.graph)
        with torch.inference_mode():
            for inputs in islice(cycle(batches), TIMED_RUNS if kind == "latency" else 1):
                profile.run(*inputs)
        costs: dict[str, float] = dict(profile.macs)
        if kind == "latency":
            costs = {name: statistics.median(times) for name, times in profile.seconds.items()}
        total = sum(costs[name] for name in self.layers)
        return {name: costs[name] / total for name in self.layers}

    def _copy(self) -> fx.GraphModule:
        """Copy the float graph, but not its weights."""
        return copy_graph(self.graph, self.graph.state_dict(keep_vars=True).values())

    def _quantizer(self, observer: Observer, formats: Mapping[str, str]) -> MixedQuantizer:
        layers = (
            [name for name, chosen in formats.items() if chosen == wanted]
            for wanted in (FLOAT, UINT16)
        )
        return MixedQuantizer(
            self.scheme, observer, self.exclude, *layers, embeddings=self.embeddings
        )


class _LayerProfile(fx.Interpreter):
    """Runs a float graph, and counts and times its layers."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.timer = CallTimer(torch.get_num_threads())
        self.macs: Counter[str] = Counter()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        """Layer → its time in each run, over all calls."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        for times in self.seconds.values():
            times.append(0.0)
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        if n.target not in WEIGHTED:
            return super().run_node(n)
        result, seconds = self.timer.call(partial(super().run_node, n))
        name = layer_name(n)
        self.seconds[name] = self.seconds[name] or [0.0]
        self.seconds[name][-1] += seconds
        _, weight, *_ = self.fetch_args_kwargs_from_env(n)[0]
        self.macs[name] += result.numel() * weight[0].numel()
        return result


def _activation_observers(
    prepared: fx.GraphModule,
) -> Iterator[tuple[str, Any, list[fx.Node]]]:
    """Yield each observed activation's name, its observer, and its readers."""
    for node in prepared.graph.nodes:
        if node.op == "call_module" and node.args[0].op != "get_attr":
            source = skip_observers(node)  # it may have observers in 8 and in 16 bits
            yield source.name, prepared.get_submodule(node.target), list(node.users)


WILDCARDS = set("*?[")
QUANTIZED_TOO = {ADDITION, AVERAGE_POOL, EMBEDDING, *MOVES}


@dataclass(frozen=True)
class WeightedLayer:
    """A convolution or a linear layer."""

    name: str | None
    """Its module; None where `exclude` cannot name the layer alone, as it belongs to no module, or
    to one in which something else is quantized too."""
    weight: torch.Tensor
    """With the BatchNorm after it folded in, outputs first."""


def weighted_layers(module: nn.Module, signature: Signature) -> list[WeightedLayer]:
    """Return the convolutions and linear layers in graph order; those called twice are in twice."""
    graph = capture(module, signature)
    modules = {name for name, _ in module.named_modules()}
    protect_shared_layers_(graph)
    fuse_conv_bn_(graph)
    layers = []
    for layer in graph.graph.nodes:
        if layer.target not in WEIGHTED or not is_constant(layer.args[1]):
            continue
        name = layer_name(layer)
        excluded = [node for node in graph.graph.nodes if is_excluded(node, (name,))]
        alone = all(
            node.target not in QUANTIZED_TOO
            and (node.target not in WEIGHTED or layer_name(node) == name)
            for node in excluded
        )
        is_named = name in modules and not WILDCARDS & set(name)
        weight = value_of(graph, layer.args[1]).detach()
        layers.append(WeightedLayer(name if is_named and alone else None, weight))
    return layers
