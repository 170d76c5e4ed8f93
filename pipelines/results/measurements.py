"""What a run measures of each artifact."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pydantic import field_validator, model_validator

from compress.common.config import Settings
from compress.common.errors import StageFailed
from compress.profiling.batch_dependence import BatchDependence
from compress.profiling.benchmark import unmeasurable
from compress.profiling.quantiles import Interval

if TYPE_CHECKING:
    from collections.abc import Callable

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context


SELF_SPEEDUP_TOLERANCE = 1.2
"""A model against itself may seem so many times faster: what is asked second finds warm caches."""

Bounds = tuple[float, float]


class MetricReport(Settings):
    """A metric's value on a split."""

    name: str
    split: str
    value: float

    @field_validator("value", mode="before")
    @classmethod
    def _not_a_number(cls, value: Any) -> Any:
        return math.nan if value is None else value  # as JSON has it


class LatencyReport(Settings):
    """Time of one call, in milliseconds, on samples of `val` where there are any."""

    batch: int
    p50: float | None
    p95: float | None
    p50_interval: Bounds | None = None
    """Where that lies, with the confidence of 95 %; None where an older run kept none."""
    p95_interval: Bounds | None = None
    reason: str = ""
    """Why p50 or p95 is None."""
    outliers: float
    """Fraction of the calls that took far longer than the others, by Tukey's fence."""
    ventiles: tuple[float, ...] = ()
    """Below these stayed 5 %, 10 %, … 95 % of the calls; empty where an older run kept none."""

    @model_validator(mode="before")
    @classmethod
    def _shows_what_is_sure(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        content = {**content, "ventiles": content.get("ventiles", ())}
        if not all(map(_possible, content["ventiles"])):
            content["ventiles"] = ()
        return _drop_unreliable(content, {"p50": "p50 in ms", "p95": "p95 in ms"}, "reason")


class Measurements(Settings):
    """What was measured of an artifact; None where its format does not tell."""

    metric: MetricReport | None
    parameters: int | None
    macs: int | None
    bytes: int
    latency_ms: LatencyReport
    speedup: float | None
    """How many times faster than the baseline, both measured in turn; None where the machine was
    too busy to tell."""
    speedup_interval: Bounds | None
    """Where that lies, with the confidence of 95 %."""
    speedup_reason: str = ""
    """Why it is None."""
    speedup_blocks: tuple[float, ...] = ()
    """The ratio in each block of consecutive calls, from which that follows."""
    bytes_ratio: float
    """The baseline's bytes divided by this artifact's."""
    peak_mebibytes: float | None = None
    """The most memory that opening it and calls take, beyond what the libraries take; None where
    it cannot be measured, and where an older run did not."""
    peak_reason: str = ""
    """Why it could not be measured."""
    batch_dependence: BatchDependence | None = None
    """Whether answers depend on what else is in the batch; None where an older run did not ask."""

    @model_validator(mode="before")
    @classmethod
    def _shows_what_is_sure(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        blocks = tuple(filter(_possible, content.get("speedup_blocks", ())))
        content = {**content, "speedup_blocks": blocks}
        return _drop_unreliable(content, {"speedup": "the speedup"}, "speedup_reason")

    @property
    def unmeasurable_reasons(self) -> tuple[str, ...]:
        """Why figures could not be measured on this machine, in words."""
        return tuple(filter(None, (self.speedup_reason, self.latency_ms.reason)))

    @classmethod
    def from_artifact(
        cls, artifact: Artifact, baseline: Artifact, context: Context
    ) -> Measurements:
        """Measure an artifact against the baseline."""
        metric = None
        if context.data is not None and "val" in context.data.datasets:
            value = context.score(artifact)
            metric = MetricReport(name=context.metric.name, split="val", value=value)
        compared = context.compare_latency(baseline, artifact, artifact.signature.smallest_batch)
        reason = ""
        if (
            artifact.digest == baseline.digest
            and not 1 / SELF_SPEEDUP_TOLERANCE <= compared.speedup <= SELF_SPEEDUP_TOLERANCE
        ):
            doubt = f"the same model seems {compared.speedup:.2f} times as fast as itself"
            reason = unmeasurable("the speedup", doubt)
        return cls(
            metric=metric,
            parameters=artifact.parameters(),
            macs=artifact.macs(),
            bytes=artifact.payload_bytes,
            latency_ms=LatencyReport.model_validate(compared.after.model_dump()),
            speedup=None if reason else compared.speedup,
            speedup_interval=None if reason else compared.interval,
            speedup_reason=reason,
            speedup_blocks=tuple(float(f"{ratio:.4g}") for ratio in compared.ratios),
            bytes_ratio=baseline.payload_bytes / artifact.payload_bytes,
        )

    def with_peak(self, measure: Callable[[], float]) -> Measurements:
        """Return the same with the peak of memory, or with why it could not be measured."""
        try:
            return self.model_copy(update={"peak_mebibytes": measure()})
        except StageFailed as error:
            return self.model_copy(update={"peak_reason": str(error)})


def _drop_unreliable(
    content: dict[str, Any], figures: dict[str, str], reason: str
) -> dict[str, Any]:
    """Leave out figures that say nothing, as those that older versions extrapolated.

    Args:
        content: fields, some of them figures.
        figures: their names, and what they are in words.
        reason: name of the field that says why a figure is left out; the first one's reason.
    """
    content = dict(content)
    for name, words in figures.items():
        doubt = _unreliable_reason(content.get(name), content.get(f"{name}_interval"))
        if doubt:
            content |= {name: None, f"{name}_interval": None}
            content[reason] = content.get(reason) or unmeasurable(words, doubt)
    return content


def _unreliable_reason(value: float | None, interval: Any) -> str:
    if value is None:
        return "no number was found"
    if not _possible(value):
        return f"{value:g} was found"
    if interval is None:
        return ""  # an older run kept none
    return Interval(*(math.nan if end is None else end for end in interval)).unreliable_reason


def _possible(value: float | None) -> bool:
    """Whether a time or a ratio of times can be true."""
    return value is not None and math.isfinite(value) and value > 0
