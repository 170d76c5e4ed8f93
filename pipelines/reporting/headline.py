"""The first line of a passed run: what was gained, and which file to deploy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.results.schema import readable_bytes

if TYPE_CHECKING:
    from pipelines.results.schema import Report

NOT_FOR_DEPLOYMENT = ("eager", "graph", "torchserve", "triton", "kserve")
"""Kinds of artifacts that only Python runs, and packages of an artifact that is exported before."""
NOT_SERVED = ("executorch", "tensorrt", "genai", "compressed-tensors", "gguf")
"""Kinds that `compress serve` does not take."""


@dataclass(frozen=True)
class Headline:
    """What the recommended artifact gained against the baseline."""

    gains: str
    """Such as `4.36 MB → 290 kB, 9.1× faster, accuracy 0.9944 → 0.9917`."""
    artifact: str
    """Its folder, relative to that of the results."""
    file: str
    """Its file in that folder."""
    is_served: bool
    """Whether `compress serve` takes it."""


def headline(report: Report) -> Headline | None:
    """Return what to deploy of a passed run: its fastest exported artifact, else its smallest.

    None where a stage did not pass, nothing was exported, there is no baseline to compare with, or
    each exported model has an output that moved and that nothing reads.
    """
    unsure = {stage.name for stage in report.stages if stage.unread_outputs}
    exported = [
        (stage.measurements, stage.artifact)
        for stage in report.stages
        if stage.name != report.baseline_name
        and stage.artifact.kind not in NOT_FOR_DEPLOYMENT
        and unsure.isdisjoint((*stage.branch, stage.name))
    ]
    if report.status != "passed" or report.baseline is None or not exported:
        return None
    before = report.baseline
    after, artifact = min(exported, key=lambda e: (-(e[0].speedup or 0), e[0].bytes))
    gains = [f"{readable_bytes(before.bytes)} → {readable_bytes(after.bytes)}"]
    if after.speedup is not None:
        slower = after.speedup < 1
        factor = 1 / after.speedup if slower else after.speedup
        gains.append(f"{factor:.1f}× {'slower' if slower else 'faster'}")
    if before.metric and after.metric:
        gains.append(f"{after.metric.name} {before.metric.value:.4f} → {after.metric.value:.4f}")
    fastest: Any = artifact.facts.get("fastest")  # of export_fastest
    if fastest:
        gains.append(fastest["verdict"])
    return Headline(", ".join(gains), artifact.path, artifact.file, artifact.kind not in NOT_SERVED)
