"""Gates on the pipeline's metric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from compress.common.errors import StageFailed
from compress.core.gates.gate import Gate, describe_value
from compress.core.metrics.metric import metric_class

if TYPE_CHECKING:
    from pydantic import JsonValue

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context
    from compress.core.verdict import Uncertainty, Verdict


class _MetricGate(Gate):
    needs_data: ClassVar[bool] = True
    judges_quality: ClassVar[bool] = True
    depends_on_batch: ClassVar[bool] = True

    def uncertainty(
        self, before: Artifact, after: Artifact, context: Context
    ) -> Uncertainty | None:
        return context.drop_uncertainty(before, after)

    def measurement_key(self) -> dict[str, JsonValue]:
        # Apart from values of earlier versions, without such intervals.
        return {**super().measurement_key(), "measured": "by part"}

    def unsuitable_metric(self, metric: str) -> str:
        is_measured = metric_class(metric).is_measured
        return "" if is_measured else "the pipeline has no metric; add `metric:`"


class MaxDrop(_MetricGate):
    """The metric on `val` gets worse by at most `points` hundredths."""

    gate: Literal["max_drop"] = "max_drop"
    points: Annotated[float, Field(allow_inf_nan=False)]
    """Largest loss allowed, in hundredths of the metric (percentage points for accuracy)."""

    limit_field: ClassVar[str] = "points"
    rule_template: ClassVar[str] = "drop <= {points:g} hundredths of the metric"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the loss in points, negative when the result is better."""
        # Rounded: 0.98 - 0.97 must not exceed one point by a float's last bit.
        return round(context.metric.drop_points(context.score(before), context.score(after)), 9)

    def unsuitable_metric(self, metric: str) -> str:
        """Return why so many points of an accuracy cannot be meant, or there is no metric."""
        problem = unlikely_points(self.points) if metric_class(metric).is_fraction else ""
        return f"points: {problem}" if problem else super().unsuitable_metric(metric)

    @classmethod
    def rule_in_words(cls, verdict: Verdict, metric: str) -> str:
        """Return the rule: in points where 1 is best, and else in the metric's own unit."""
        kind = metric_class(metric)
        if not kind.in_points:
            change = "rises" if kind.higher is False else "gets worse"
            return f"{metric} {change} by at most {verdict.limit / 100:g}"
        points = "point" if verdict.limit == 1 else "points"
        return f"loses at most {verdict.limit:g} {points} of {metric}"

    @classmethod
    def value_in_words(cls, verdict: Verdict, metric: str) -> str:
        """Return the value in the unit of the rule, or why there is none."""
        if metric_class(metric).in_points:
            return describe_value(verdict, " points")
        return describe_value(verdict, "", 0.01)


class MaxRelativeDrop(_MetricGate):
    """The metric on `val` gets worse by at most `percent` of its value before."""

    gate: Literal["max_relative_drop"] = "max_relative_drop"
    percent: Annotated[float, Field(allow_inf_nan=False)]
    """Largest loss allowed, in percent of the metric before: 2 lets a perplexity of 20 become 20.4,
    and an accuracy of 0.90 become 0.882."""

    limit_field: ClassVar[str] = "percent"
    rule_template: ClassVar[str] = "drop <= {percent:g} % of the metric"
    report_template: ClassVar[str] = "{metric} gets worse by at most {limit:g} %"

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the loss in percent, negative when the result is better."""
        score = context.score(before)
        if score == 0:
            raise StageFailed(f"{context.metric.name} was 0 before, which has no percentage")
        return round(context.metric.drop_points(score, context.score(after)) / abs(score), 9)

    def uncertainty(
        self, before: Artifact, after: Artifact, context: Context
    ) -> Uncertainty | None:
        """Return the interval of the loss in percent, taking the metric before as given."""
        return context.drop_uncertainty(before, after).scaled(1 / abs(context.score(before)))


class MinMetric(_MetricGate):
    """The metric on `val` reaches a value."""

    gate: Literal["min_metric"] = "min_metric"
    at: Annotated[float, Field(allow_inf_nan=False)]
    """The value to reach, in the metric's own unit (0.975 for an accuracy of 97.5 %)."""

    limit_field: ClassVar[str] = "at"
    rule_template: ClassVar[str] = "metric >= {at:g}"
    report_template: ClassVar[str] = "{metric} >= {limit:g}"
    higher_passes: ClassVar[bool] = True
    compares: ClassVar[bool] = False

    def measure(self, before: Artifact, after: Artifact, context: Context) -> float:
        """Return the metric on `val`."""
        if not context.metric.higher_is_better:
            raise StageFailed(f"metric {context.metric.name} falls with quality; use max_drop")
        return context.score(after)

    def uncertainty(
        self, before: Artifact, after: Artifact, context: Context
    ) -> Uncertainty | None:
        """Return the interval of the metric."""
        return context.score_by_sample(after).uncertainty()

    def unsuitable_metric(self, metric: str) -> str:
        """Return why the metric, or a limit in its unit, cannot be meant."""
        kind = metric_class(metric)
        if kind.higher is False:
            return f"metric {metric} falls with quality; use max_drop"
        if kind.is_fraction and self.at > 1:
            return (
                f"at: found {self.at:g}, and {metric} is a fraction of 1; "
                f"for {self.at:g} % write {self.at / 100:g}"
            )
        return super().unsuitable_metric(metric)


def unlikely_points(points: float) -> str:
    """Return why so many points of an accuracy cannot be meant, and what to write; or nothing."""
    # Who writes 0.005 means half a point.
    if 0 < points < 0.01:
        return (
            f"{points:g} is less than a hundredth of a percentage point; points are "
            f"percentage points, so for {100 * points:g} % write {100 * points:g}"
        )
    if points > 50:
        return (
            f"{points:g} would let more than half of all answers become wrong; points "
            "are percentage points, expected at most 50"
        )
    return ""
