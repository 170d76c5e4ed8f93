"""Measure the effect of a quantized graph on the metric and on the outputs."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.common.forward import accept_any_batch, torch_predictor
from compress.core.val_halves import HalfOfVal, halves_of_val
from compress.quantization.numeric_debug.sqnr import Deviation

if TYPE_CHECKING:
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
