"""What a run knows of the stages that led to an artifact, for those who are given it alone."""

from __future__ import annotations

from pydantic import JsonValue

from compress.common.config import Settings
from compress.core.verdict import Verdict


class PastStage(Settings):
    """One stage that led to an artifact; nothing in it changes from run to run."""

    name: str
    stage: str
    input: str
    """Name of the stage whose artifact it read, or `source`."""
    settings: dict[str, JsonValue]
    kind: str
    digest: str
    """Of the artifact that it made."""
    bytes: int
    """Size of that artifact's file."""
    parameters: int | None
    macs: int | None
    metric: dict[str, JsonValue] | None
    """Name, split and value."""
    verdicts: tuple[Verdict, ...]
    """Without values that differ from run to run, such as latencies."""


class History(Settings):
    """The road to an artifact."""

    pipeline: str
    seed: int
    data: str | None
    """Fingerprint of the data."""
    versions: dict[str, str]
    """Of Python, this toolkit and its libraries."""
    source: dict[str, JsonValue]
    """What decided the model as it came in: the hash of its checkpoint and of its code."""
    source_digest: str
    """Of the artifact that it became."""
    stages: tuple[PastStage, ...]
