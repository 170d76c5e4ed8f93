"""What a quantized graph does to the metric, and to the answers."""

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

    from compress.artifacts.eager_model import EagerModel
    from compress.core.context import Context

RANKED_SAMPLES = 64
"""Samples of `val` on which answers are compared to rank layers."""


@dataclass(frozen=True, order=True)
class AccuracyLoss:
    """What rounding does; ordered by the metric first, where that was measured."""

    drop: float
    """Points by which the metric is worse; 0 where it is not measured for each layer."""
    noise: float
    """Noise over signal, in energy, the worst output's."""
    sqnr_db: float = 0.0
    by_metric: bool = False

    def over(self, cost: float) -> tuple[float, float]:
        """Return the harm per cost."""
        return max(self.drop, 0.0) / cost, self.noise / cost

    def metric_drop(self) -> float | None:
        """Return the drop of the metric, or the decibels, as it was asked for."""
        if not self.by_metric:
            return round(self.sqnr_db, 1)
        return round(self.drop, 6) if math.isfinite(self.drop) else None


class SensitivityMeter:
    """Holds graphs against a float model on `val`."""

    def __init__(self, model: EagerModel, context: Context, sensitivity: str) -> None:
        """Ask the float model.

        Raises:
            StageFailed: there is no data, or the metric cannot be measured.
        """
        self.model, self.context, self.by_metric = model, context, sensitivity == "metric"
        self.data = context.need_data("quantize_mixed")
        self.metric = context.metric.name
        self.before = context.score(model)
        self._inputs = [b.inputs for b in self.data.batches("val", limit=RANKED_SAMPLES)]
        with context.predictor(model) as predict:
            self._expected = [predict(*inputs) for inputs in self._inputs]

    def drop(self, graph: fx.GraphModule) -> float:
        """Return by how many points a graph's metric on `val` is worse; infinite without one."""
        with ExitStack() as stack:
            predict = stack.enter_context(torch_predictor(graph, "cpu", self.context.threads))
            asked = accept_any_batch(predict, self.model.signature)
            reference = None
            if self.metric == "fidelity":
                source = self.context.artifact("source")
                reference = stack.enter_context(self.context.predictor(source))
            try:
                after = evaluate(asked, self.data, "val", self.context.metric, reference)
            except StageFailed:  # the float model's was measured: the graph's is not finite
                return math.inf
        # Rounded: 0.98 - 0.97 must not exceed one point by a float's last bit.
        return round(self.context.metric.drop_points(self.before, after), 9)

    def harm(self, graph: fx.GraphModule) -> AccuracyLoss:
        """Return what a graph does to the answers, and to the metric where that is asked for."""
        deviations = [Deviation() for _ in self._expected[0]]
        with torch_predictor(graph, "cpu", self.context.threads) as predict:
            asked = accept_any_batch(predict, self.model.signature)
            for inputs, expected in zip(self._inputs, self._expected, strict=True):
                for deviation, a, b in zip(deviations, expected, asked(*inputs), strict=True):
                    deviation.add(a.cpu(), b)
        sqnr_db = min(deviation.sqnr_db for deviation in deviations)
        drop = self.drop(graph) if self.by_metric else 0.0
        return AccuracyLoss(drop, 10 ** (-sqnr_db / 10), sqnr_db, self.by_metric)
