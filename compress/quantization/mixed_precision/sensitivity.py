"""Measure the effect of a quantized graph on the metric and on the outputs."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed
from compress.common.forward import accept_any_batch, torch_predictor
from compress.core.metrics import evaluate
from compress.quantization.numeric_debug.sqnr import Deviation

if TYPE_CHECKING:
    from torch import fx

    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.core.context import Context
    from compress.core.metrics import Metric
    from compress.data.splits import Splits

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


@dataclass
class HalfOfVal:
    """The metric on every other sample of `val`."""

    data: Splits
    """Its `val` has these samples alone."""
    metric: Metric
    context: Context
    model: Artifact
    float_score: float = field(init=False)

    def __post_init__(self) -> None:
        with self.context.predictor(self.model) as predict:
            self.float_score = self.score(predict)

    def score(self, predict: Predictor) -> float:
        """Measure the metric of a predictor that takes any number of samples."""
        with ExitStack() as stack:
            reference = None
            if self.metric.name == "fidelity":
                source = self.context.artifact("source")
                reference = stack.enter_context(self.context.predictor(source))
            return evaluate(predict, self.data, "val", self.metric, reference)

    def metric_drop(self, graph: fx.GraphModule) -> float:
        """Return by how many points a graph's metric is worse; infinite without one."""
        with torch_predictor(graph, "cpu", self.context.threads) as predict:
            try:
                score = self.score(accept_any_batch(predict, self.model.signature))
            except StageFailed:  # the float model has a score, so the graph's is not finite
                return math.inf
        # Rounded: 0.98 - 0.97 must not exceed one point by a float's last bit.
        return round(self.metric.drop_points(self.float_score, score), 9)

    def facts(self, drop: float) -> dict[str, Any]:
        """Return what was measured on these samples, for the manifest."""
        return {
            "samples": len(self.data.split("val")),  # type: ignore[arg-type]  # Splits admits none without
            "before": round(self.float_score, 6),
            "drop_points": None if drop == math.inf else round(drop, 6),
        }


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
        halves = data.alternating_halves("val", "quantize_mixed")
        self.decided_on, self.confirmed_on = (
            HalfOfVal(half, metric, context, model) for half in halves
        )
        batches = halves[0].batches("val", limit=RANKING_SAMPLES)
        self._inputs = [batch.inputs for batch in batches]
        with context.predictor(model) as predict:
            self._expected = [predict(*inputs) for inputs in self._inputs]

    def metric_drop(self, graph: fx.GraphModule) -> float:
        """Return by how many points a graph's metric is worse on the half that decides."""
        return self.decided_on.metric_drop(graph)

    def confirm(self, graph: fx.GraphModule, max_drop_points: float) -> dict[str, Any]:
        """Measure a chosen graph on both halves, for the manifest; warn where the other disagrees.

        The half that decides is the one on which this graph was the best of many: what it loses
        there is too little, and what it loses on the other is not.
        """
        decided, confirmed = (
            half.metric_drop(graph) for half in (self.decided_on, self.confirmed_on)
        )
        if confirmed > max_drop_points >= decided:
            logger.warning(
                "quantize_mixed: loses %.4g points of %s on the half of val that the search did "
                "not see, and %.4g on the other; max_drop_points is %g: lower it, bring more "
                "samples, or judge the stage by a gate",
                *(confirmed, self.metric, decided, max_drop_points),
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
