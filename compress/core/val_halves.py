"""Two halves of `val`: one for choosing among many models, the other for judging the choice."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed
from compress.core.metrics import evaluate

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.core.context import Context
    from compress.core.metrics import Metric
    from compress.data.splits import Splits


def halves_of_val(
    model: Artifact, context: Context, why: str, metric: Metric, most: int | None = None
) -> tuple[HalfOfVal, HalfOfVal]:
    """Measure a model on every other sample of `val`, and on the others.

    The best of many models on some samples is worse on others, so those by which it was chosen do
    not tell how good it is. With `most`, each half has about so many samples and no more.

    Raises:
        StageFailed: there is no data, one sample alone, or no metric; the message says that `why`
            needs it.
    """
    first, second = context.need_data(why).alternating_halves("val", why, most)
    return HalfOfVal(first, metric, context, model), HalfOfVal(second, metric, context, model)


@dataclass
class HalfOfVal:
    """The metric on every other sample of `val`."""

    data: Splits
    """Its `val` has these samples alone."""
    metric: Metric
    context: Context
    model: Artifact
    """The model that others are compared with."""
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

    def drop_points(self, predict: Predictor) -> float:
        """Return by how many points a predictor's metric is worse; infinite without one."""
        try:
            score = self.score(predict)
        except StageFailed:  # the model has a score, so the other's is not finite
            return math.inf
        # Rounded: 0.98 - 0.97 must not exceed one point by a float's last bit.
        return round(self.metric.drop_points(self.float_score, score), 9)

    def facts(self, drop: float) -> dict[str, Any]:
        """Return what was measured on these samples, for a manifest."""
        return {
            "samples": len(self.data.split("val")),  # type: ignore[arg-type]  # Splits admits none without
            "before": round(self.float_score, 6),
            "drop_points": None if drop == math.inf else round(drop, 6),
        }
