"""Measure the effect of a quantized graph on the metric and on the outputs."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compress.common.errors import StageFailed
from compress.common.forward import accept_any_batch, torch_predictor
from compress.core.metrics import evaluate
from compress.quantization.numeric_debug.sqnr import Deviation

if TYPE_CHECKING:
    from torch import fx

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context

RANKING_SAMPLES = 64
"""Samples of `val` on which outputs are compared to rank layers."""


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
    """Compares graphs with a float model on `val`."""

    def __init__(self, model: Artifact, context: Context, sensitivity: str) -> None:
        """Measure the float model; StageFailed where there is no data, or no metric of it."""
        self.model, self.context, self.by_metric = model, context, sensitivity == "metric"
        self.data = context.need_data("quantize_mixed")
        self.metric = context.metric.name
        # Inferred once, as graphs are measured many times.
        metric = context.metric.for_model(model.signature)
        self._metric = metric.with_inferred_loss(self.data)
        self.float_score = context.score(model)
        self._inputs = [b.inputs for b in self.data.batches("val", limit=RANKING_SAMPLES)]
        with context.predictor(model) as predict:
            self._expected = [predict(*inputs) for inputs in self._inputs]

    def metric_drop(self, graph: fx.GraphModule) -> float:
        """Return by how many points a graph's metric on `val` is worse; infinite without one."""
        with ExitStack() as stack:
            predict = stack.enter_context(torch_predictor(graph, "cpu", self.context.threads))
            predict = accept_any_batch(predict, self.model.signature)
            reference = None
            if self.metric == "fidelity":
                source = self.context.artifact("source")
                reference = stack.enter_context(self.context.predictor(source))
            try:
                score = evaluate(predict, self.data, "val", self._metric, reference)
            except StageFailed:  # the float model has a score, so the graph's is not finite
                return math.inf
        # Rounded: 0.98 - 0.97 must not exceed one point by a float's last bit.
        return round(self._metric.drop_points(self.float_score, score), 9)

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
