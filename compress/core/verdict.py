"""A gate's verdict, and the record of the stages and verdicts that led to a packaged artifact."""

from __future__ import annotations

from pydantic import JsonValue

from compress.common.config import Settings


class Verdict(Settings):
    """The result of a gate."""

    gate: str
    """The gate's type."""
    value: float | None
    """What was measured; None when it could not be."""
    limit: float
    """What the value was compared with."""
    passed: bool
    against: str | None
    """Name of the artifact compared with; None where the gate measures the result alone."""
    rule: str
    """The rule with its unit, such as ``size ratio <= 0.25``."""
    reason: str = ""
    """Why it could not be measured."""


def explain(verdict: Verdict) -> str:
    """Format a verdict in one line: the gate, its rule, and the measured value."""
    found = verdict.reason or f"found {verdict.value:.4g}"
    against = f" against {verdict.against}" if verdict.against not in (None, "input") else ""
    return f"{verdict.gate}{against}: {verdict.rule}, {found}"


class PastStage(Settings):
    """One stage that led to an artifact; equal runs give equal records."""

    name: str
    stage: str
    input: str
    """Name of the stage whose artifact it read, or `source`."""
    settings: dict[str, JsonValue]
    kind: str
    digest: str
    """Of the artifact that it wrote."""
    bytes: int
    """Size of that artifact's file."""
    parameters: int | None
    macs: int | None
    metric: dict[str, JsonValue] | None
    """Name, split and value of the pipeline's metric."""
    verdicts: tuple[Verdict, ...]
    """Without values that differ from run to run, such as latencies."""


class History(Settings):
    """All stages from the source model to an artifact."""

    pipeline: str
    seed: int
    data: str | None
    """Fingerprint of the data."""
    versions: dict[str, str]
    """Of Python, this toolkit and its libraries."""
    source: dict[str, JsonValue]
    """What identifies the source model: the hash of its checkpoint and of its code."""
    source_digest: str
    """Digest of the artifact that was made of the source model."""
    stages: tuple[PastStage, ...]
