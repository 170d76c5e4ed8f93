"""Search for the layers that must leave 8-bit integers so that the metric is kept at least cost.

After the accuracy-aware training-free loop of NNCF (Kozlov et al., "Neural Network Compression
Framework for fast model inference", 2020), with layers ranked by the output error of quantizing
each alone, as in HAWQ (Dong et al., "HAWQ: Hessian AWare Quantization of Neural Networks with
Mixed-Precision", 2019), where the Hessian estimates that error.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed
from compress.common.forward import accept_any_batch, torch_predictor
from compress.core.val_halves import HalfOfVal, halves_of_val
from compress.quantization.mixed_precision.bit_candidates import FLOAT, UINT16, CandidateBuilder
from compress.quantization.numeric_debug.sqnr import Deviation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context

logger = logging.getLogger(__name__)

RANKING_SAMPLES = 64
"""Samples of the half that decides on which outputs are compared to rank layers."""


@dataclass(frozen=True, order=True)
class AccuracyLoss:
    """The effect of quantization; ordered by the metric first, where that is measured."""

    drop: float
    """Points by which the metric is worse; 0 where layers are not ranked by it."""
    noise: float
    """Noise over signal, in energy, of the worst output."""
    sqnr_db: float = 0.0
    by_metric: bool = False

    def per_cost(self, cost: float) -> tuple[float, float]:
        """Return the loss divided by a layer's cost, for sorting."""
        return max(self.drop, 0.0) / cost, self.noise / cost

    def reported(self) -> float | None:
        """Return what layers are ranked by: points, or decibels; None where not finite."""
        if not self.by_metric:
            return round(self.sqnr_db, 1)
        return round(self.drop, 6) if math.isfinite(self.drop) else None


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
        halves = halves_of_val(model, context, "quantize_mixed", metric)
        self.decided_on, self.confirmed_on = halves
        batches = self.decided_on.data.batches("val", limit=RANKING_SAMPLES)
        self._inputs = [batch.inputs for batch in batches]
        with context.predictor(model) as predict:
            self._expected = [predict(*inputs) for inputs in self._inputs]

    def metric_drop(self, graph: fx.GraphModule) -> float:
        """Return by how many points a graph's metric is worse on the half that decides."""
        return self._drop_on(self.decided_on, graph)

    def _drop_on(self, half: HalfOfVal, graph: fx.GraphModule) -> float:
        with torch_predictor(graph, "cpu", self.context.threads) as predict:
            return half.drop_points(accept_any_batch(predict, self.model.signature))

    def confirm(self, graph: fx.GraphModule, max_drop_points: float) -> dict[str, Any]:
        """Measure a chosen graph on both halves, for the manifest; warn where the other disagrees.

        The half that decides is the one on which this graph was the best of many: what it loses
        there is too little, and what it loses on the other is not.
        """
        decided, confirmed = (
            self._drop_on(half, graph) for half in (self.decided_on, self.confirmed_on)
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


Formats = dict[str, str]
"""Layer → observer of its input, `uint16` or `float`; others have the default observer."""


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
        if self.best is None:
            raise StageFailed(self._failure())
        return self.best

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
            self._drops[key] = self.meter.metric_drop(self.candidates.build(formats).graph)
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
        """Measure the loss of quantizing each layer alone, with each observer there is."""
        names = self.candidates.layers
        others = [chosen for chosen in self.fallback if chosen not in (FLOAT, UINT16)]
        for observer in others:
            self.calibrate(observer)
        for done, name in enumerate(names, 1):
            alone = {other: FLOAT for other in names if other != name}
            for formats in (alone, *({**alone, name: observer} for observer in others)):
                if self._is_late():
                    return
                loss = self.meter.accuracy_loss(self.candidates.build(formats).graph)
                if name not in self.losses or loss < self.losses[name]:
                    self.losses[name] = loss
                    if name in formats:
                        self.observers[name] = formats[name]
            self.meter.context.progress("rank layers", done, len(names), name)

    def _order(self) -> list[str]:
        """Return the layers, by loss per cost: those first that are best put back to float."""
        return sorted(
            self.losses,
            key=lambda name: self.losses[name].per_cost(self.costs[name]),
            reverse=True,
        )

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

    def _failure(self) -> str:
        best = min(self._drops, key=lambda key: self._drops[key])
        floats = [name for name, chosen in best if chosen == FLOAT]
        count = len(self.candidates.layers)
        summary = (
            f"max_drop_points {self.max_drop_points:g} is not met: the best of "
            f"{self.evaluations} candidates loses {self._drops[best]:.4g} points of "
            f"{self.meter.metric} with {len(floats)} of {count} layers in float"
        )
        if self.stopped:
            return f"{summary}; the time was over, raise `minutes` or `max_drop_points`"
        if FLOAT not in self.fallback:
            return f"{summary}; add `float` to `fallback`, or raise `max_drop_points`"
        remedy = "raise `max_drop_points` or use another stage"
        return f"{summary}; no choice that was tried keeps it, {remedy}"

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
