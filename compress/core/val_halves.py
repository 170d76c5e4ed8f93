"""Two halves of `val`: one for choosing among many models, the other for judging the choice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed
from compress.core.metrics import Metric, evaluate

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact
    from compress.common.forward import Predictor
    from compress.core.context import Context
    from compress.core.metrics.score import Score
    from compress.data.splits import Splits


def halves_of_val(
    model: Artifact, context: Context, why: str, metric: Metric, most: int | None = None
) -> tuple[HalfOfVal, HalfOfVal]:
    """Measure a model on every other sample of `val`, and on the others.

    The best of many models on some samples is worse on others, so those by which it was chosen do
    not tell how good it is. With `most`, of a long `val` each half has about so many samples.
    `why` is what needs them, for the error where there is no data, or one sample alone.
    """
    data = context.need_data(why)
    samples = len(data.split("val"))  # type: ignore[arg-type]  # Splits admits none without
    if samples < 2:
        raise StageFailed(f"{why} halves split 'val', which has one sample; bring more")
    parts = data.interleaved_parts("val", 2 * max(1, round(samples / (2 * most))) if most else 2)
    first, second = parts[0], parts[len(parts) // 2]
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
    reference: Score = field(init=False)
    """The model's own metric."""

    def __post_init__(self) -> None:
        with self.context.predictor(self.model) as predict:
            self.reference = self.score(predict)

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return len(self.data.split("val"))  # type: ignore[arg-type]  # Splits admits none without

    @property
    def points_of_sample(self) -> float:
        """Points that one sample is worth, where the metric is a fraction of them; else 0."""
        return 100 / self.samples if self.metric.is_fraction else 0.0

    def score(self, predict: Predictor) -> Score:
        """Measure the metric of a predictor that takes any number of samples."""
        with self.context.reference(self.metric) as reference:
            return evaluate(predict, self.data, "val", self.metric, reference)

    def drop_points(self, predict: Predictor) -> float:
        """Return by how many points a predictor's metric is worse; infinite without one."""
        return self.drop_with_interval(predict)[0]

    def drop_with_interval(self, predict: Predictor) -> tuple[float, tuple[float, float] | None]:
        """Return by how many points a predictor's metric is worse, and the 95 % interval of that.

        Infinite where there is no metric; the interval is None where no sums over samples give it.
        """
        try:
            score = self.score(predict)
        except StageFailed:  # the model has a score, so the other's is not finite
            return math.inf, None
        sign = -100 if self.metric.higher_is_better else 100
        change = self.reference.change_to(score).scaled(sign)
        # Rounded: 0.98 - 0.97 must not exceed one point by a float's last bit.
        return round(self.metric.drop_points(self.reference.value, score.value), 9), change.interval

    def facts(self, drop: float) -> dict[str, Any]:
        """Return what was measured on these samples, for a manifest."""
        return {
            "samples": self.samples,
            "before": round(self.reference.value, 6),
            "drop_points": None if drop == math.inf else round(drop, 6),
        }
