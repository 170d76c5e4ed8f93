"""What a run measures of each artifact."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.core.batch_dependence import BatchDependence
from compress.core.errors import StageFailed
from compress.core.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from compress.core.artifact import Artifact
    from compress.core.stage import Context


class MetricReport(Settings):
    """A metric's value on a split."""

    name: str
    split: str
    value: float


class LatencyReport(Settings):
    """Time of one call, in milliseconds."""

    batch: int
    p50: float
    p95: float
    outliers: float
    """Fraction of the calls that took far longer than the others, by Tukey's fence."""
    ventiles: tuple[float, ...] = ()
    """Below these stayed 5 %, 10 %, … 95 % of the calls; empty where an older run kept none."""


class Measurements(Settings):
    """What was measured of an artifact; None where its format does not tell."""

    metric: MetricReport | None
    parameters: int | None
    macs: int | None
    bytes: int
    latency_ms: LatencyReport
    speedup: float
    """How many times faster than the baseline, both measured in turn."""
    speedup_interval: tuple[float, float]
    """Where that lies, with the confidence of 95 %."""
    speedup_blocks: tuple[float, ...] = ()
    """The ratio in each block of consecutive calls, from which that follows."""
    bytes_ratio: float
    """The baseline's bytes divided by this artifact's."""
    peak_mebibytes: float | None = None
    """The most memory that opening it and one call take, beyond what the libraries take; None where
    it cannot be measured, and where an older run did not."""
    peak_reason: str = ""
    """Why it could not be measured."""
    batch_dependence: BatchDependence | None = None
    """Whether answers depend on what else is in the batch; None where an older run did not ask."""

    @classmethod
    def of(cls, artifact: Artifact, baseline: Artifact, context: Context) -> Measurements:
        """Measure an artifact against the baseline."""
        metric = None
        if context.data is not None and "val" in context.data.datasets:
            value = context.score(artifact)
            metric = MetricReport(name=context.metric.name, split="val", value=value)
        compared = context.compare_latency(baseline, artifact, batch=1)
        return cls(
            metric=metric,
            parameters=artifact.parameters(),
            macs=artifact.macs(),
            bytes=artifact.payload_bytes,
            latency_ms=LatencyReport.model_validate(compared.after.model_dump()),
            speedup=compared.speedup,
            speedup_interval=compared.interval,
            speedup_blocks=tuple(float(f"{ratio:.4g}") for ratio in compared.ratios),
            bytes_ratio=baseline.payload_bytes / artifact.payload_bytes,
        )

    def with_peak(self, measure: Callable[[], float]) -> Measurements:
        """Return the same with the peak of memory, or with why it could not be measured."""
        try:
            return self.model_copy(update={"peak_mebibytes": measure()})
        except StageFailed as error:
            return self.model_copy(update={"peak_reason": str(error)})
