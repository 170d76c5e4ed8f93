"""The parts of a report: each stage's result, failure or skip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, JsonValue

from compress.common.config import Settings
from compress.core.verdict import Verdict
from compress.pipelines.results.measurements import Measurements
from compress.pipelines.system.signals import INTERRUPTED
from compress.profiling.operator_table import OperatorTable

if TYPE_CHECKING:
    from compress.artifacts.artifact import Artifact


class ArtifactReport(Settings):
    """Where an artifact is, and the hashes that identify it."""

    kind: str
    path: str
    """Relative to the report."""
    file: str
    """The file to deploy."""
    bytes: int
    sha256: str
    """Of the file to deploy."""
    digest: str
    """Of the artifact's manifest, which holds the hash of every file."""
    facts: dict[str, JsonValue]
    """Facts that the stage recorded in the artifact's manifest."""

    @classmethod
    def from_artifact(cls, artifact: Artifact, path: str) -> ArtifactReport:
        """Describe an artifact that lies under a path relative to the report."""
        return cls(
            kind=artifact.kind,
            path=path,
            file=artifact.payload_name,
            bytes=artifact.payload_bytes,
            sha256=artifact.manifest.files[artifact.payload_name].sha256,
            digest=artifact.digest,
            facts=artifact.manifest.facts,
        )


class StageReport(Settings):
    """One stage of a run."""

    name: str
    stage: str
    input: str
    """Name of the stage whose artifact it reads, or `source`."""
    branch: tuple[str, ...] = ()
    """Names of its ancestors, from `source` to its input."""
    cached: bool
    reason: str
    """Why it had to run; empty when it was cached."""
    fetched_from: str = ""
    """URL of the shared store that the artifact came from; empty if it was made or cached here."""
    seconds: float
    """Seconds that the stage took when it ran."""
    judged_seconds: float = 0.0
    """Seconds that measurements and gates took in this run; 0 when they were cached."""
    artifact: ArtifactReport
    measurements: Measurements
    unread_outputs: dict[str, float] = {}
    """Outputs that no loss, metric or gate reads and that differ from the input's by more than
    rounding explains → by how much on `val`, relative to how much the output varies there."""
    operators: tuple[OperatorTable, ...] = ()
    """The operators that took most time in training steps that this run has traced."""
    verdicts: tuple[Verdict, ...]
    status: Literal["passed", "refused"] = Field(
        default_factory=lambda known: (
            "passed" if all(verdict.passed for verdict in known["verdicts"]) else "refused"
        )
    )
    """Whether all of its gates passed; stages without a result are listed as failures."""


class FailureReport(Settings):
    """A stage that failed or was interrupted before it had a result."""

    name: str
    stage: str
    branch: tuple[str, ...] = ()
    """Names of its ancestors, from `source` to its input."""
    error: str
    status: Literal["failed", "interrupted"] = Field(
        default_factory=lambda known: INTERRUPTED if known["error"] == INTERRUPTED else "failed"
    )
    """An interrupted run may contain failed stages, too."""


class SkippedReport(Settings):
    """A stage that did not run because one that it depends on did not pass."""

    name: str
    stage: str
    branch: tuple[str, ...]
    """Names of its ancestors, from `source` to its input."""
    because: str
    """Name of the stage that failed, or that a gate refused."""


class TestReport(Settings):
    """The metric on the test split, touched once, at the end."""

    __test__ = False  # the name is the field's, not pytest's

    metric: str
    values: dict[str, float]
    """By stage name: the baseline, and each artifact that no other stage reads."""
    samples: int | None = None
    """Samples that have a target; None in reports of older versions."""
    unlike_val: dict[str, tuple[str, ...]] = {}
    """Where the metric on `test` and on `val` differ beyond their intervals: a line → its stage."""
