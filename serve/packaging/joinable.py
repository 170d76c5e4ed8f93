"""Decide whether a server may batch requests: only if measurements on `val` show no influence.

Packaging stages measure on rows of `val` whether the rows of a batch influence each other's
outputs. ``compress serve``, which has no data, uses the measurement in a run's report, and checks
it on seeded random rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compress.profiling.batch_dependence import BatchDependence, measure, rounding_tolerance
from compress.profiling.probe_rows import ROWS, seeded_rows
from compress.serve.packaging.recorded_measurements import REPORT, read_recorded

if TYPE_CHECKING:
    from pathlib import Path

    from compress.artifacts.artifact import Artifact
    from compress.profiling.batch_dependence import Call

NOT_ON_AXIS_0 = "axis 0 of the inputs and outputs does not count the rows of a batch"
NO_REPORT = (
    "no run's report shows that the rows of a batch do not influence each other; serve the "
    f"artifact in its run's folder, or give that run's {REPORT} with --report"
)


def why_not_joined(rows_stay_first: bool, dependence: BatchDependence) -> str:
    """Return why a server must not batch requests; empty if it may."""
    return dependence.why_not_joined if rows_stay_first else NOT_ON_AXIS_0


def why_not_joined_without_data(
    artifact: Artifact, call: Call, rows_stay_first: bool, report: Path | None
) -> str:
    """Return why requests to an artifact must not be batched, without data to measure on.

    `report` is a run's report.json; by default the one in the artifact's run folder.

    Raises:
        ArtifactInvalid: `report` is no run's report, or does not measure this artifact.
    """
    recorded = read_recorded(artifact, report).batch_dependence
    if not rows_stay_first:
        return NOT_ON_AXIS_0
    if recorded is None or recorded.why_not_joined:
        return NO_REPORT if recorded is None else recorded.why_not_joined
    rows = seeded_rows(artifact.signature, 2 * ROWS)
    rounding = rounding_tolerance(artifact)
    here = measure(call, artifact.signature, rows, source="seeded", rounding=rounding)
    return here.why_not_joined if here.depends else ""
