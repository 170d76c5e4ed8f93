"""Search for the layers that must leave 8-bit integers so that the metric is kept at least cost.

After the accuracy-aware training-free loop of NNCF (Kozlov et al., "Neural Network Compression
Framework for fast model inference", 2020), with layers ranked by the output error of quantizing
each alone, as in HAWQ (Dong et al., "HAWQ: Hessian AWare Quantization of Neural Networks with
Mixed-Precision", 2019), where the Hessian estimates that error. Quantized graphs, with a format for
each layer, are built from one float graph.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import fx, nn

from compress.common.errors import StageFailed
from compress.common.forward import accept_any_batch, torch_predictor
from compress.core.val_halves import HalfOfVal, halves_of_val
from compress.profiling.benchmark import CallTimer
from compress.quantization.config.dtype_scheme import Observer, Scheme, unsigned_format
from compress.quantization.numeric_debug.sqnr import Deviation
from compress.quantization.pt2e.graph_capture import (
    capture,
    copy_graph,
    is_excluded,
    module_of,
    value_of,
)
from compress.quantization.pt2e.observer_ranges import (
    fit_ranges_,
    observed,
    observers_in,
    skip_observers,
)
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
    fold_batch_norms_,
    is_constant,
    qspec,
)
from compress.quantization.pt2e.torchao_api import Q_ANNOTATION_KEY
from compress.quantization.ptq.calibrate import (
    calibrate_,
    convert,
    leave_float_,
    leave_vanishing_float_,
    prepare,
)

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.signature import Signature
    from compress.core.context import Context
    from compress.data.batch import Batch

    Range = tuple[torch.Tensor, torch.Tensor]

logger = logging.getLogger(__name__)

FLOAT, UINT16 = "float", "uint16"
TIMED_RUNS = 11  # runs of which the median time of a layer is taken
RANKING_SAMPLES = 64
"""Samples of the half that decides on which outputs are compared to rank layers."""
WILDCARDS = set("*?[")
QUANTIZED_TOO = {ADDITION, AVERAGE_POOL, EMBEDDING, *MOVES}
Formats = dict[str, str]
"""Layer → observer of its input, `uint16` or `float`; others have the default observer."""


class MixedQuantizer(OnnxRuntimeQuantizer):
    """Annotates what onnxruntime fuses, except in layers that are given other formats.

    Those in `float` stay so; those in `uint16` read 16 bits and give floats.
    """

    def __init__(
        self,
        scheme: Scheme,
        observer: Observer,
        exclude: Sequence[str],
        formats: Mapping[str, str],
        *,
        embeddings: bool,
    ) -> None:
        super().__init__(scheme, observer, exclude, embeddings=embeddings)
        self.formats = formats
        self.default = self.activation
        self.uint16 = qspec(unsigned_format(16), observer_class(observer))
        self.layers: list[str] = []
        """The layers that are quantized, in graph order, filled while annotating."""

    def _annotate_weighted(self, node: fx.Node) -> None:
        name = layer_name(node)
        chosen = self.formats.get(name)
        if chosen == FLOAT:
            return
        self.activation = self.uint16 if chosen == UINT16 else self.default
        super()._annotate_weighted(node)
        self.activation = self.default
        if Q_ANNOTATION_KEY not in node.meta:
            return
        if name not in self.layers:
            self.layers.append(name)
        # An output that no layer reads in 8 bits stays float, but for a convolution's, without
        # which onnxruntime does not fuse it. With a 16-bit input it fuses nothing anyway.
        tail = next((r for r in node.users if r.target in CLAMPS and len(node.users) == 1), node)
        others = {other for other, kind in self.formats.items() if kind in (FLOAT, UINT16)}
        if chosen == UINT16 or (
            node.target is LINEAR
            and all(r.target in WEIGHTED and layer_name(r) in others for r in tail.users)
        ):
            tail.meta[Q_ANNOTATION_KEY].output_qspec = None


def layer_name(node: fx.Node) -> str:
    """Return the user's module of a convolution or linear layer, or else its weight's name."""
    weight: Any = node.args[1]
    return module_of(node) or str(weight.target)


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
    ranges: dict[str, dict[str, Range]] = field(default_factory=dict)
    """Observer → activation → the ends of its range."""
    extremes: dict[str, Range] = field(default_factory=dict)
    """Activation → its smallest and largest value; 16 bits need no narrower range."""
    layers: list[str] = field(default_factory=list)
    vanishing: dict[str, float] = field(default_factory=dict)
    """Tensor too small for integers → its largest absolute value."""
    float_operators: frozenset[str] = frozenset()
    """Names of the nodes that read such tensors, and stay float whatever their format."""

    def __post_init__(self) -> None:
        self.graph = self._copy()
        fold_batch_norms_(self.graph)

    def calibrate(
        self, observer: str, batches: Iterable[Batch], report: Callable[[int], None]
    ) -> None:
        """Find the ranges of all activations with an observer; the first one is the default."""
        quantizer = self._quantizer(cast("Observer", observer), {})
        prepared = prepare(self._copy(), quantizer)
        calibrate_(prepared, self.signature, batches, report)
        for name, calibrated, _ in _activation_observers(prepared):
            scale, zero = calibrated.calculate_qparams()
            least, most = calibrated.quant_min, calibrated.quant_max
            low, high = ((scale * (limit - zero)).squeeze() for limit in (least, most))
            if calibrated.qscheme is torch.per_tensor_symmetric:
                high = (scale * (most - least) / 2).squeeze()
                low = -high
            # Extremes with which a `minmax` observer has the same scale and zero point.
            self.ranges.setdefault(observer, {})[name] = low, high
            self.extremes.setdefault(name, (calibrated.min_val.clone(), calibrated.max_val.clone()))
        if not self.layers:
            self.vanishing, readers = leave_vanishing_float_(prepared, quantizer)
            self.float_operators = frozenset(node.name for node in readers)
            floats = {layer_name(node) for node in readers if node.target in WEIGHTED}
            self.layers = [name for name in quantizer.layers if name not in floats]

    def build(self, formats: Mapping[str, str]) -> tuple[fx.GraphModule, MixedQuantizer]:
        """Return a graph with other formats than the default in some layers, and its quantizer."""
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
        return convert(prepared), quantizer

    def costs(self, kind: str, batches: Sequence[tuple[torch.Tensor, ...]]) -> dict[str, float]:
        """Return each layer's share of what all layers cost, on batches of one sample each.

        `kind` is `macs`, or `latency`: median time of the float layer in PyTorch on this machine.
        """
        profile, runs = _LayerProfile(self.graph), []
        with torch.inference_mode():
            for inputs in islice(cycle(batches), TIMED_RUNS if kind == "latency" else 1):
                profile.macs, profile.seconds = defaultdict(float), defaultdict(float)
                profile.run(*inputs)
                runs.append(profile.seconds if kind == "latency" else profile.macs)
        costs = {name: statistics.median(run[name] for run in runs) for name in self.layers}
        total = sum(costs.values())
        return {name: cost / total for name, cost in costs.items()}

    def _copy(self) -> fx.GraphModule:
        """Copy the float graph, but not its weights."""
        return copy_graph(self.graph, self.graph.state_dict(keep_vars=True).values())

    def _quantizer(self, observer: Observer, formats: Mapping[str, str]) -> MixedQuantizer:
        return MixedQuantizer(
            self.scheme, observer, self.exclude, formats, embeddings=self.embeddings
        )


class _LayerProfile(fx.Interpreter):
    macs: defaultdict[str, float]
    seconds: defaultdict[str, float]

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.timer = CallTimer(torch.get_num_threads())

    def run_node(self, n: fx.Node) -> Any:
        if n.target not in WEIGHTED:
            return super().run_node(n)
        result, seconds = self.timer.call(partial(super().run_node, n))
        self.seconds[layer_name(n)] += seconds
        _, weight, *_ = self.fetch_args_kwargs_from_env(n)[0]
        self.macs[layer_name(n)] += result.numel() * weight[0].numel()
        return result


def _activation_observers(prepared: fx.GraphModule) -> Iterator[tuple[str, Any, list[fx.Node]]]:
    """Yield each observed activation's name, its observer, and its readers."""
    for node, observer in observers_in(prepared):
        if observed(node).op != "get_attr":
            source = skip_observers(node)  # it may have observers in 8 and in 16 bits
            yield source.name, observer, list(node.users)


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
    fold_batch_norms_(graph)
    layers = []
    for layer in graph.graph.nodes:
        if layer.target not in WEIGHTED or not is_constant(layer.args[1]):
            continue
        name = layer_name(layer)
        alone = all(
            node.target not in QUANTIZED_TOO
            and (node.target not in WEIGHTED or layer_name(node) == name)
            for node in graph.graph.nodes
            if is_excluded(node, (name,))
        )
        is_named = name in modules and not WILDCARDS & set(name)
        weight = value_of(graph, layer.args[1]).detach()
        layers.append(WeightedLayer(name if is_named and alone else None, weight))
    return layers


@dataclass(frozen=True, order=True)
class AccuracyLoss:
    """The effect of quantization; ordered by the metric first, where that is measured."""

    drop: float
    """Points by which the metric is worse; 0 where layers are not ranked by it."""
    noise: float
    """Noise over signal, in energy, of the worst output."""
    sqnr_db: float
    by_metric: bool

    def reported(self) -> float | None:
        """Return what layers are ranked by: points, or decibels; None where not finite."""
        if not self.by_metric:
            return round(self.sqnr_db, 1)
        return reported(self.drop)


class SensitivityMeter:
    """Compares graphs with a float model on one half of `val`; the other is for the result alone.

    Halves are every other sample, as `val` may be sorted by class.
    """

    def __init__(self, model: Artifact, context: Context, sensitivity: str) -> None:
        """Measure the float model; StageFailed where there is no data, or no metric of it."""
        self.model, self.context, self.by_metric = model, context, sensitivity == "metric"
        data = context.need_data("quantize_mixed")
        self.metric = context.metric.name
        # Inferred once, as graphs are measured many times.
        metric = context.metric.for_model(model.signature).with_inferred_loss(data)
        self.decided_on, self.confirmed_on = halves_of_val(model, context, "quantize_mixed", metric)
        batches = self.decided_on.data.batches("val", limit=RANKING_SAMPLES)
        self._inputs = [batch.inputs for batch in batches]
        with context.predictor(model) as predict:
            self._expected = [predict(*inputs) for inputs in self._inputs]

    def metric_drop(self, graph: fx.GraphModule, half: HalfOfVal | None = None) -> float:
        """Return by how many points a graph's metric is worse on a half: the one that decides."""
        with torch_predictor(graph, "cpu", self.context.threads) as predict:
            predict = accept_any_batch(predict, self.model.signature)
            return (half or self.decided_on).drop_points(predict)

    def confirm(self, graph: fx.GraphModule, max_drop_points: float) -> dict[str, Any]:
        """Measure a chosen graph on both halves, for the manifest; warn where the other disagrees.

        The half that decides is the one on which this graph was the best of many: what it loses
        there is too little, and what it loses on the other is not.
        """
        decided, confirmed = (
            self.metric_drop(graph, half) for half in (self.decided_on, self.confirmed_on)
        )
        if confirmed > max_drop_points >= decided:
            logger.warning(
                "quantize_mixed: loses %.4g points of %s on the half of val that the search did "
                "not see, and %.4g on the other; max_drop_points is %g: lower it, bring more "
                "samples, or judge the stage by a gate",
                confirmed,
                self.metric,
                decided,
                max_drop_points,
            )
        return {
            "decided_on": self.decided_on.facts(decided),
            "confirmed_on": self.confirmed_on.facts(confirmed),
        }

    def accuracy_loss(self, graph: fx.GraphModule) -> AccuracyLoss:
        """Measure a graph's noise in the outputs, and its metric where layers are ranked by it."""
        deviations = [Deviation() for _ in self._expected[0]]
        with torch_predictor(graph, "cpu", self.context.threads) as predict:
            predict = accept_any_batch(predict, self.model.signature)
            for inputs, expected in zip(self._inputs, self._expected, strict=True):
                for deviation, a, b in zip(deviations, expected, predict(*inputs), strict=True):
                    deviation.add(a.cpu(), b)
        sqnr_db = min(deviation.sqnr_db for deviation in deviations)
        drop = self.metric_drop(graph) if self.by_metric else 0.0
        return AccuracyLoss(drop, 10 ** (-sqnr_db / 10), sqnr_db, self.by_metric)


@dataclass
class BitSearch:
    """One search: its settings and its results so far."""

    candidates: CandidateBuilder
    calibrate: Callable[[str], None]
    """Calibrates with another observer, once it is needed."""
    meter: SensitivityMeter
    max_drop_points: float
    fallback: tuple[str, ...]
    costs: Mapping[str, float]
    """Layer → its share of the cost of all layers."""
    deadline: float
    """On the clock of :func:`time.monotonic`."""
    losses: dict[str, AccuracyLoss] = field(default_factory=dict)
    """Of each layer quantized alone, with the best of the observers."""
    observers: Formats = field(default_factory=dict)
    """Layers for which another observer than the default one has a smaller loss."""
    best: Formats | None = None
    """The cheapest choice so far that keeps the metric."""
    stopped: bool = False
    """Whether the time was over before the search was."""
    _drops: dict[frozenset[tuple[str, str]], float] = field(default_factory=dict)

    def run(self) -> Formats:
        """Return the formats that keep the metric; StageFailed, with the best ones, if none do."""
        self._search()
        if self.best is not None:
            return self.best
        best = min(self._drops, key=lambda key: self._drops[key])
        floats = [name for name, chosen in best if chosen == FLOAT]
        if self.stopped:
            remedy = "the time was over, raise `minutes` or `max_drop_points`"
        elif FLOAT not in self.fallback:
            remedy = "add `float` to `fallback`, or raise `max_drop_points`"
        else:
            remedy = "no choice that was tried keeps it, "
            remedy += "raise `max_drop_points` or use another stage"
        raise StageFailed(
            f"max_drop_points {self.max_drop_points:g} is not met: the best of "
            f"{self.evaluations} candidates loses {self._drops[best]:.4g} points of "
            f"{self.meter.metric} with {len(floats)} of {len(self.candidates.layers)} layers in "
            f"float; {remedy}"
        )

    @property
    def evaluations(self) -> int:
        """How many candidates' metric was measured against `max_drop_points`."""
        return len(self._drops)

    def drop(self, formats: Formats) -> float:
        """Return by how many points the metric is worse; infinite where the time is over."""
        key = frozenset(formats.items())
        if key not in self._drops:
            # No further candidate then meets the limit: the search ends with the best one so far.
            if self._is_late():
                return math.inf
            self._drops[key] = self.meter.metric_drop(self.candidates.build(formats)[0])
        return self._drops[key]

    def _search(self) -> None:
        if self._keeps_metric({}):
            return
        self._rank_layers()
        if self.observers and self._keeps_metric(dict(self.observers)):
            return
        order = self._order()
        for chosen in [c for c in (FLOAT, UINT16) if c in self.fallback]:
            count = self._smallest_prefix(order, chosen)
            given = dict.fromkeys(order[:count], chosen)
            if not given:
                # Prefixes that bisection skipped, as more layers in float may do worse; then all
                # layers but one, as the layer with the loss may be by far the most expensive, and
                # ranked last.
                others = [order[:count] for count in range(1, len(order))]
                others += [[n for n in order if n != kept] for kept in reversed(order)]
                choices = (dict.fromkeys(names, chosen) for names in others if names)
                given = next(filter(self._keeps_with, choices), {})
            if given:
                # Even within the smallest prefix a smaller set may do.
                for name in reversed(list(given)):
                    fewer = {other: chosen for other in given if other != name}
                    if fewer and self._keeps_with(fewer):
                        given = fewer
                if chosen == FLOAT and UINT16 in self.fallback:
                    for name in reversed(list(given)):
                        if self._keeps_with({**given, name: UINT16}):
                            given = {**given, name: UINT16}
                return

    def _keeps_metric(self, formats: Formats) -> bool:
        keeps = self.drop(formats) <= self.max_drop_points
        if keeps:
            self.best = formats
        return keeps

    def _rank_layers(self) -> None:
        names = self.candidates.layers
        others = [chosen for chosen in self.fallback if chosen not in (FLOAT, UINT16)]
        for observer in others:
            self.calibrate(observer)
        for done, name in enumerate(names, 1):
            alone = {other: FLOAT for other in names if other != name}
            for formats in (alone, *({**alone, name: observer} for observer in others)):
                if self._is_late():
                    return
                loss = self.meter.accuracy_loss(self.candidates.build(formats)[0])
                if name not in self.losses or loss < self.losses[name]:
                    self.losses[name] = loss
                    if name in formats:
                        self.observers[name] = formats[name]
            self.meter.context.progress("rank layers", done, len(names), name)

    def _order(self) -> list[str]:
        """Return the layers, by loss per cost: those first that are best put back to float."""

        def loss_per_cost(name: str) -> tuple[float, float]:
            loss, cost = self.losses[name], self.costs[name]
            return max(loss.drop, 0.0) / cost, loss.noise / cost

        return sorted(self.losses, key=loss_per_cost, reverse=True)

    def _smallest_prefix(self, order: Sequence[str], chosen: str) -> int:
        """Bisect how many layers need a format; 0 where no number of them keeps the metric."""
        most = len(order) - (chosen == FLOAT)  # something must stay in integers
        low, high = 0, 1
        while high <= most and not self._keeps_with(dict.fromkeys(order[:high], chosen)):
            low, high = high, min(2 * high, most) if high < most else most + 1
        if high > most:
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            keeps = self._keeps_with(dict.fromkeys(order[:middle], chosen))
            low, high = (low, middle) if keeps else (middle, high)
        return high

    def _keeps_with(self, given: Formats) -> bool:
        return self._keeps_metric({**self.observers, **given})

    def _is_late(self) -> bool:
        """Whether the time is over; at least one candidate is measured."""
        late = bool(self._drops) and time.monotonic() > self.deadline
        self.stopped |= late
        return late

    def facts(self, formats: Formats) -> dict[str, Any]:
        """Return the result, for the manifest."""
        layers = [
            {
                "module": name,
                "format": formats.get(name, next(iter(self.candidates.ranges))),
                "sensitivity": self.losses[name].reported() if name in self.losses else None,
                "cost": round(self.costs[name], 4),
            }
            for name in (self._order() if len(self.losses) == len(self.costs) else self.costs)
        ]
        return {
            "metric": self.meter.metric,
            "drop_all_quantized_points": reported(self._drops[frozenset()]),
            "evaluations": self.evaluations,
            "stopped_by_time": self.stopped,
            "layers": layers,
        }


def reported(drop: float) -> float | None:
    """Return a drop for the manifest; None for an infinite one, of outputs that are not finite."""
    return None if drop == math.inf else round(drop, 6)
