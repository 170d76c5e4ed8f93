"""The stages that led to an artifact, as a package records them for whoever receives it alone."""

from __future__ import annotations

from pydantic import JsonValue

from compress.common.config import Settings
from compress.core.verdict import Verdict


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
