"""The first line of a passed run: what was gained, and which file to deploy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.pipelines.results.schema import readable_bytes

if TYPE_CHECKING:
    from compress.pipelines.results.measurements import Measurements
    from compress.pipelines.results.schema import Report

NOT_FOR_DEPLOYMENT = ("eager", "graph", "torchserve", "triton", "kserve")
"""Kinds of artifacts that only Python runs, and packages of an artifact that is exported before."""
NOT_SERVED = ("executorch", "tensorrt", "genai", "compressed-tensors", "gguf")
"""Kinds that `compress serve` does not take."""


@dataclass(frozen=True)
class Headline:
    """What the recommended artifact gained against the baseline."""

    gains: str
    """Such as `4.36 MB → 286 kB, 2.7× faster by compression (12.7× against eager PyTorch: 4.7× by
    ONNX Runtime), accuracy 0.9944 → 0.9917`."""
    artifact: str
    """Its folder, relative to that of the results."""
    file: str
    """Its file in that folder."""
    is_served: bool
    """Whether `compress serve` takes it."""


def headline(report: Report) -> Headline | None:
    """Return what to deploy of a passed run: its fastest exported artifact, else its smallest.

    None where a stage did not pass, nothing was exported, there is no baseline to compare with, or
    all files are slower than the uncompressed model in their runtime, have a warning about their
    accuracy, or an output that moved and that nothing reads.
    """
    unsure = {stage.name for stage in report.stages if stage.unread_outputs}
    exported = [
        (stage.measurements, stage.artifact)
        for stage in report.stages
        if stage.name not in (report.baseline_name, *report.accuracy_doubts)
        and stage.artifact.kind not in NOT_FOR_DEPLOYMENT
        # Who exports the uncompressed model to the same runtime has the faster file.
        and not (stage.measurements.same_runtime and stage.measurements.same_runtime.is_slower)
        and unsure.isdisjoint((*stage.branch, stage.name))
    ]
    if report.status != "passed" or report.baseline is None or not exported:
        return None
    before = report.baseline
    after, artifact = min(exported, key=lambda e: (-(e[0].speedup or 0), e[0].bytes))
    gains = [f"{readable_bytes(before.bytes)} → {readable_bytes(after.bytes)}"]
    if speed := speed_in_words(after, before):
        gains.append(speed)
    if before.metric and after.metric:
        name, drop = after.metric.name, after.metric.drop
        change = f" ({drop.in_words(name)})" if drop else ""
        gains.append(f"{name} {before.metric.value:.4f} → {after.metric.value:.4f}{change}")
    fastest: Any = artifact.facts.get("fastest")  # of export_fastest
    if fastest:
        gains.append(fastest["verdict"])
    return Headline(", ".join(gains), artifact.path, artifact.file, artifact.kind not in NOT_SERVED)


def speed_in_words(after: Measurements, before: Measurements) -> str:
    """Return what compression gained in speed, and what the runtime did; empty if unmeasurable."""
    total, own, origin = after.speedup, after.same_runtime, before.same_runtime
    if own is None or own.speedup is None:
        return _factor(total) if total is not None else ""
    gained = (
        f"{_factor(own.speedup)} by compression"
        if own.is_faster or own.is_slower
        else f"as fast as before in {own.runtime}"
    )
    if total is None or origin is None or origin.runtime == own.runtime:
        return gained
    by_runtime = f"{total / own.speedup:.1f}× by {own.runtime}"
    return f"{gained} ({total:.1f}× against {origin.runtime}: {by_runtime})"


def _factor(speedup: float) -> str:
    return f"{1 / speedup:.1f}× slower" if speedup < 1 else f"{speedup:.1f}× faster"
