"""Measurements of an artifact: metric, size, latency, memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pydantic import field_validator, model_validator

from compress.artifacts.artifact import WEIGHTS_ON_DISK, Artifact
from compress.common.config import Settings
from compress.common.errors import StageFailed, Unavailable
from compress.core.gates.runtime import IN_PYTORCH, in_runtime_of, runtime_of
from compress.core.metrics import metric_class
from compress.core.verdict import Uncertainty
from compress.profiling.batch_dependence import BatchDependence
from compress.profiling.benchmark import CallTimes, Comparison, unmeasurable
from compress.profiling.output_summary import OutputSummary
from compress.profiling.quantiles import Interval
from compress.serve.packaging.val_preparation import Preparation

if TYPE_CHECKING:
    from compress.core.context import Context

Bounds = tuple[float, float]
NOT_MEASURED = "not measured: "
"""Begins the reasons of figures that nobody asked for, which are no sign of a busy machine."""
JUDGED_QUICKLY = f"{NOT_MEASURED}the run judges quickly"
QUICK_SECONDS = 0.1  # for which a latency is measured in a run that judges quickly


class Drop(Settings):
    """How much worse a metric is than another model's on the same samples."""

    points: float
    """In hundredths of the metric, negative where it is better."""
    uncertainty: Uncertainty

    def in_words(self, metric: str) -> str:
        """Describe it in points where 1 is best, and else in the metric's own unit."""
        change, unit, verbs = 1.0, " points", ("loses", "gains")
        if not metric_class(metric).in_points:
            change, unit, verbs = 0.01, "", ("worse by", "better by")
        much = f"{verbs[self.points < 0]} {abs(self.points) * change:.2g}{unit}"
        # The interval is of what is said: of a gain, or of a loss.
        factor = -change if self.points < 0 else change
        return f"{much}, {self.uncertainty.in_words(factor=factor)}"

    def cell(self, metric: str) -> str:
        """Describe it in a cell of a table: ``0.28 (-0.78 to 1.6)``."""
        change = 1 if metric_class(metric).in_points else 0.01
        low, high = self.uncertainty.interval or (math.nan, math.nan)
        interval = f" ({change * low:.2g} to {change * high:.2g})" if low <= high else ""
        return f"{change * self.points:.2g}{interval}"


class MetricReport(Settings):
    """A metric's value on a split."""

    name: str
    split: str
    value: float
    samples: int | None = None
    """Samples that have a target; None in reports of older versions."""
    drop: Drop | None = None
    """How much worse it is than the baseline's; None of the baseline itself."""

    @field_validator("value", mode="before")
    @classmethod
    def _not_a_number(cls, value: Any) -> Any:
        return math.nan if value is None else value  # as JSON has it


class LatencyReport(CallTimes):
    """Time of one call, in milliseconds, on samples of `val` where there are any."""

    p50: float | None
    p95: float | None
    p50_interval: Bounds | None = None
    """95 % confidence interval of p50; None in reports of older versions."""
    p95_interval: Bounds | None = None
    reason: str = ""

    @model_validator(mode="before")
    @classmethod
    def _clear_unreliable(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        content = {**content, "ventiles": content.get("ventiles", ())}
        if not all(map(_possible, content["ventiles"])):
            content["ventiles"] = ()
        return _drop_unreliable(content, {"p50": "p50 in ms", "p95": "p95 in ms"}, "reason")


class SpeedupReport(Settings):
    """How many times faster than a baseline, from interleaved calls with equal threads."""

    speedup: float | None
    """None where timings on a busy machine were too noisy, or there is nothing to compare with."""
    speedup_interval: Bounds | None
    """95 % confidence interval."""
    speedup_reason: str = ""
    speedup_blocks: tuple[float, ...] = ()
    """Ratio of each block of consecutive calls; the speedup is their median."""

    @model_validator(mode="before")
    @classmethod
    def _clear_unreliable(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        blocks = tuple(filter(_possible, content.get("speedup_blocks", ())))
        content = {**content, "speedup_blocks": blocks}
        return _drop_unreliable(content, {"speedup": "the speedup"}, "speedup_reason")

    @property
    def was_left_out(self) -> bool:
        """Whether nobody asked for it, so that it was not measured."""
        return self.speedup_reason.startswith(NOT_MEASURED)

    @property
    def is_slower(self) -> bool:
        """Whether it is slower beyond what chance explains."""
        return self.speedup_interval is not None and self.speedup_interval[1] < 1

    @property
    def is_faster(self) -> bool:
        """Whether it is faster beyond what chance explains."""
        return self.speedup_interval is not None and self.speedup_interval[0] > 1


class SameRuntimeReport(SpeedupReport):
    """Speedup over the uncompressed model in the artifact's own runtime: what compression gains."""

    runtime: str
    takes_uncompressed: bool = True
    """Whether the uncompressed model could be exported to it; `speedup_reason` says why not."""


class Measurements(SpeedupReport):
    """Measurements of an artifact; None where its format lacks the information.

    Its speedup is over the run's baseline as it is, most often in eager PyTorch, so that it holds
    what the artifact's runtime gains as well.
    """

    metric: MetricReport | None
    parameters: int | None
    macs: int | None
    macs_at: dict[str, int] = {}
    """Sizes of the named axes that they were counted at, of a typical sample of `val`; empty where
    all are fixed, without samples, which counts 8 elements, and in reports of older versions."""
    bytes: int
    latency_ms: LatencyReport
    device: str = ""
    """What it ran on, and the baseline for the speedup; empty in reports of older versions."""
    same_runtime: SameRuntimeReport | None = None
    """Over the baseline in its own runtime; None for packages, and in reports of older versions."""
    bytes_ratio: float
    """The baseline's bytes divided by this artifact's."""
    peak_mebibytes: float | None = None
    """Peak memory of opening and calling the model, without the libraries' own; None where it could
    not be measured and in reports of older versions."""
    peak_reason: str = ""
    outputs: tuple[OutputSummary, ...] = ()
    """Of each output on `val`; empty without a metric, and in reports of older versions."""
    batch_dependence: BatchDependence | None = None
    """Whether outputs depend on the other rows of a batch; None in reports of older versions."""
    preparation: tuple[Preparation, ...] = ()
    """How images and texts of requests, once prepared, compare with `val`; empty where servers take
    tensors alone, and in reports of older versions."""

    @property
    def figures(self) -> dict[str, float | None]:
        """The figures by name, for comparisons and trackers; None where one is not known."""
        own = self.same_runtime
        return {
            **({self.metric.name: self.metric.value} if self.metric else {}),
            "bytes": self.bytes,
            "parameters": self.parameters,
            "macs": self.macs,
            "p50_ms": self.latency_ms.p50,
            "p95_ms": self.latency_ms.p95,
            "peak_mebibytes": self.peak_mebibytes,
            "speedup": self.speedup,
            **({"speedup_in_runtime": own.speedup} if own else {}),
        }

    @property
    def unmeasurable_reasons(self) -> tuple[str, ...]:
        """Why speedup and latency could not be measured on this machine; empty if they were."""
        own = self.same_runtime
        in_runtime = own.speedup_reason if own and own.takes_uncompressed else ""
        # Both speedups have the same reason on a busy machine, but for its figure.
        reasons = filter(None, (self.speedup_reason or in_runtime, self.latency_ms.reason))
        return tuple(
            reason
            for reason in dict.fromkeys(reasons)
            if reason != WEIGHTS_ON_DISK and not reason.startswith(NOT_MEASURED)
        )

    @classmethod
    def from_artifact(
        cls, artifact: Artifact, baseline: Artifact, context: Context, untimed: str = ""
    ) -> Measurements:
        """Measure an artifact against the baseline; its latency is not if a reason is given."""
        metric, score = None, None
        has_val = context.data is not None and "val" in context.data.datasets
        if has_val and context.metric.is_measured:
            score, drop = context.score_by_sample(artifact), None
            if artifact.digest != baseline.digest and not context.is_quick:
                before = context.score(baseline)
                drop = Drop(
                    points=round(context.metric.drop_points(before, score.value), 9),
                    uncertainty=context.drop_uncertainty(baseline, artifact),
                )
            metric = MetricReport(
                name=context.metric.name,
                split="val",
                value=score.value,
                samples=score.samples,
                drop=drop,
            )
        if artifact.is_streamed or baseline.is_streamed:
            untimed = WEIGHTS_ON_DISK
        found = cls.sizes(artifact, baseline, context, untimed)
        found = found.model_copy(
            update={"metric": metric, "outputs": score.outputs if score else ()}
        )
        if untimed:
            return found
        if context.is_quick:
            batch = artifact.signature.smallest_batch
            compared = context.compare_latency(artifact, artifact, batch, QUICK_SECONDS)
        else:
            compared, own = _compare_latencies(artifact, baseline, context)
        latency = compared.after.model_dump(exclude={"disturbed"})
        speedup = _speedup(compared)
        if reason := speedup["speedup_reason"]:
            latency |= {"p50": None, "p95": None, "ventiles": (), "reason": reason}
        if context.is_quick:
            timed = _no_speedup(JUDGED_QUICKLY)
        else:
            timed = {**speedup, "same_runtime": own}
        timed["latency_ms"] = LatencyReport.model_validate(latency)
        timed["device"] = artifact.runs_on(context.device)
        return cls.model_validate({**dict(found), **timed})

    @classmethod
    def sizes(
        cls, artifact: Artifact, baseline: Artifact, context: Context, reason: str
    ) -> Measurements:
        """Return the sizes of an artifact, and a reason why nothing else was measured."""
        batch = artifact.signature.smallest_batch
        return cls(
            metric=None,
            parameters=artifact.parameters(),
            **_macs(artifact, context),
            bytes=artifact.payload_bytes,
            latency_ms=LatencyReport(batch=batch, p50=None, p95=None, reason=reason, outliers=0.0),
            **_no_speedup(reason),
            bytes_ratio=baseline.payload_bytes / artifact.payload_bytes,
            peak_reason=reason,
        )


def _macs(artifact: Artifact, context: Context) -> dict[str, Any]:
    if context.is_quick and artifact.kind in IN_PYTORCH:  # they are counted in a call
        return {"macs": None}
    sizes = context.typical_sizes(artifact.signature)
    return {"macs": context.macs(artifact, sizes), "macs_at": sizes}


def _speedup(compared: Comparison) -> dict[str, Any]:
    disturbed = compared.after.disturbed
    reason = disturbed and unmeasurable("the speedup", disturbed)
    return {
        "speedup": None if reason else compared.speedup,
        "speedup_interval": None if reason else compared.interval,
        "speedup_reason": reason,
        "speedup_blocks": tuple(float(f"{ratio:.4g}") for ratio in compared.ratios),
    }


def _no_speedup(reason: str) -> dict[str, Any]:
    return {"speedup": None, "speedup_interval": None, "speedup_reason": reason}


def _compare_latencies(
    artifact: Artifact, baseline: Artifact, context: Context
) -> tuple[Comparison, SameRuntimeReport | None]:
    """Measure an artifact in turn with the uncompressed model: as it is, and in its own runtime."""
    runtime, batch = runtime_of(artifact.kind), artifact.signature.smallest_batch
    if runtime is None:
        return context.compare_latency(baseline, artifact, batch), None
    try:
        twin = in_runtime_of(artifact, context)
        assert twin is not None  # as there is a runtime
        if twin.digest == artifact.digest != baseline.digest:  # nothing was compressed
            measured = {"speedup": 1.0, "speedup_interval": (1.0, 1.0)}
            compared = context.compare_latency(baseline, artifact, batch)
        else:
            compared, own = context.compare_latencies([baseline, twin], artifact, batch)
            measured = _speedup(own)
    except (StageFailed, Unavailable) as error:
        measured = {
            **_no_speedup(f"the uncompressed model in {runtime.title}: {error}"),
            "takes_uncompressed": False,
        }
        compared = context.compare_latency(baseline, artifact, batch)
    return compared, SameRuntimeReport(runtime=runtime.title, **measured)


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
    return value is not None and math.isfinite(value) and value > 0
