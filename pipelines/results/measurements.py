"""Measurements of an artifact: metric, size, latency, memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pydantic import field_validator, model_validator

from compress.artifacts.artifact import WEIGHTS_ON_DISK
from compress.common.config import Settings
from compress.common.errors import StageFailed
from compress.profiling.batch_dependence import BatchDependence
from compress.profiling.benchmark import unmeasurable
from compress.profiling.output_summary import OutputSummary
from compress.profiling.quantiles import Interval

if TYPE_CHECKING:
    from collections.abc import Callable

    from compress.artifacts.artifact import Artifact
    from compress.core.context import Context


SELF_SPEEDUP_TOLERANCE = 1.2
"""A model compared with itself may seem this much faster, as the second call finds warm caches."""

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
    """95 % confidence interval of p50; None in reports of older versions."""
    p95_interval: Bounds | None = None
    reason: str = ""
    """Why p50 or p95 is None."""
    outliers: float
    """Fraction of the calls above Tukey's fence."""
    ventiles: tuple[float, ...] = ()
    """5 %, 10 %, … 95 % quantiles of the calls, ms; empty in reports of older versions."""

    @model_validator(mode="before")
    @classmethod
    def _clear_unreliable(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        content = {**content, "ventiles": content.get("ventiles", ())}
        if not all(map(_possible, content["ventiles"])):
            content["ventiles"] = ()
        return _drop_unreliable(content, {"p50": "p50 in ms", "p95": "p95 in ms"}, "reason")


class Measurements(Settings):
    """Measurements of an artifact; None where its format lacks the information."""

    metric: MetricReport | None
    parameters: int | None
    macs: int | None
    bytes: int
    latency_ms: LatencyReport
    device: str = ""
    """What it ran on where its latency was measured, and the baseline for the speedup; empty in
    reports of older versions."""
    speedup: float | None
    """How many times faster than the baseline, from interleaved calls; None where timings on a busy
    machine were too noisy."""
    speedup_interval: Bounds | None
    """95 % confidence interval of the speedup."""
    speedup_reason: str = ""
    """Why it is None."""
    speedup_blocks: tuple[float, ...] = ()
    """Ratio of each block of consecutive calls; the speedup is their median."""
    bytes_ratio: float
    """The baseline's bytes divided by this artifact's."""
    peak_mebibytes: float | None = None
    """Peak memory of opening and calling the model, without the libraries' own; None where it could
    not be measured and in reports of older versions."""
    peak_reason: str = ""
    """Why it could not be measured."""
    outputs: tuple[OutputSummary, ...] = ()
    """A summary of each output on `val`; empty without a metric, and in reports of older
    versions."""
    batch_dependence: BatchDependence | None = None
    """Whether outputs depend on the other rows of a batch; None in reports of older versions."""

    @model_validator(mode="before")
    @classmethod
    def _clear_unreliable(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        blocks = tuple(filter(_possible, content.get("speedup_blocks", ())))
        content = {**content, "speedup_blocks": blocks}
        return _drop_unreliable(content, {"speedup": "the speedup"}, "speedup_reason")

    @property
    def unmeasurable_reasons(self) -> tuple[str, ...]:
        """Why speedup and latency could not be measured on this machine; empty if they were."""
        reasons = filter(None, (self.speedup_reason, self.latency_ms.reason))
        return tuple(reason for reason in reasons if reason != WEIGHTS_ON_DISK)

    @classmethod
    def from_artifact(
        cls, artifact: Artifact, baseline: Artifact, context: Context
    ) -> Measurements:
        """Measure an artifact against the baseline."""
        metric = None
        has_val = context.data is not None and "val" in context.data.datasets
        if has_val and context.metric.is_measured:
            value = context.score(artifact)
            metric = MetricReport(name=context.metric.name, split="val", value=value)
        outputs = context.summaries_on_val(artifact)
        if artifact.is_streamed or baseline.is_streamed:
            sizes = cls.sizes(artifact, baseline, WEIGHTS_ON_DISK)
            return sizes.model_copy(update={"metric": metric, "outputs": outputs})
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
            device=artifact.runs_on(context.device),
            speedup=None if reason else compared.speedup,
            speedup_interval=None if reason else compared.interval,
            speedup_reason=reason,
            speedup_blocks=tuple(float(f"{ratio:.4g}") for ratio in compared.ratios),
            bytes_ratio=baseline.payload_bytes / artifact.payload_bytes,
            outputs=outputs,
        )

    @classmethod
    def sizes(cls, artifact: Artifact, baseline: Artifact, reason: str) -> Measurements:
        """Return the sizes of an artifact, and a reason why nothing else was measured."""
        batch = artifact.signature.smallest_batch
        return cls(
            metric=None,
            parameters=artifact.parameters(),
            macs=artifact.macs(),
            bytes=artifact.payload_bytes,
            latency_ms=LatencyReport(batch=batch, p50=None, p95=None, reason=reason, outliers=0.0),
            speedup=None,
            speedup_interval=None,
            speedup_reason=reason,
            bytes_ratio=baseline.payload_bytes / artifact.payload_bytes,
            peak_reason=reason,
        )

    def with_peak(self, measure: Callable[[], float]) -> Measurements:
        """Return a copy with the peak memory in MiB, or with the reason why it is unknown."""
        try:
            return self.model_copy(update={"peak_mebibytes": measure()})
        except StageFailed as error:
            return self.model_copy(update={"peak_reason": str(error)})


def _drop_unreliable(
    content: dict[str, Any], figures: dict[str, str], reason: str
) -> dict[str, Any]:
    """Replace unreliable figures, given with words for the `reason` field, by None."""
    content = dict(content)
    for name, words in figures.items():
        value, interval, doubt = content.get(name), content.get(f"{name}_interval"), ""
        if not _possible(value):  # older versions stored extrapolated figures
            doubt = "no number was found" if value is None else f"{value:g} was found"
        elif interval is not None:  # older versions have none
            ends = (math.nan if end is None else end for end in interval)
            doubt = Interval(*ends).unreliable_reason
        if doubt:
            content |= {name: None, f"{name}_interval": None}
            content[reason] = content.get(reason) or unmeasurable(words, doubt)
    return content


def _possible(value: float | None) -> bool:
    """Whether a time or ratio is finite and positive."""
    return value is not None and math.isfinite(value) and value > 0
