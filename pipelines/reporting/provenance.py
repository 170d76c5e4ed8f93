"""The proof chain of a run: what each artifact was made of, digest by digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from compress.artifacts.artifact import MANIFEST, Manifest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipelines.reporting.stage_rows import Row
    from pipelines.results.schema import Report


@dataclass(frozen=True)
class Link:
    """One artifact of the chain."""

    row: Row
    read: str
    """Digest of the artifact that it was made of, as the run knows it; empty where it does not."""
    check: str
    """What the sealed manifest says to that: `agrees`, `differs` or `not here`."""


def source_of(report: Report) -> dict[str, str]:
    """Return what the model as it came in is proven by; what is not known is not in it."""
    lock: Any = report.lock
    parts = lock.get("source") or {}
    names = {"checkpoint": "checkpoint, SHA-256", "code": "code, SHA-256", "library": "library"}
    told = {names[key]: str(parts[key]) for key in names if parts.get(key)}
    if parts and not parts.get("checkpoint"):
        told["checkpoint"] = "none: the weights are the factory's own, from the seed"
    digest = (lock.get("artifacts") or {}).get("source")
    if digest:
        told["artifact, digest"] = digest
    if lock.get("data"):
        told["data, fingerprint"] = lock["data"]
    return told


def links_of(report: Report, rows: Sequence[Row], out: Path | None) -> list[Link]:
    """Return the chain, each sealed manifest read again and held against the report."""
    lock: Any = report.lock
    digests = dict(lock.get("artifacts") or {})
    digests |= {row.name: row.report.artifact.digest for row in rows if row.report}
    return [
        Link(row, digests.get(row.input, ""), _check(row, digests.get(row.input), out))
        for row in rows
        if row.report
    ]


def _check(row: Row, read: str | None, out: Path | None) -> str:
    assert row.report
    if out is None:
        return "not here"
    try:
        raw = (out / row.report.artifact.path / MANIFEST).read_bytes()
        manifest = Manifest.model_validate_json(raw)
    except (OSError, ValidationError):
        return "not here"
    artifact = row.report.artifact
    file = manifest.files.get(artifact.file)
    agrees = (
        hashlib.sha256(raw).hexdigest() == artifact.digest
        and file is not None
        and file.sha256 == artifact.sha256
        and bool(manifest.lineage)
        and manifest.lineage[-1].inputs.get("input") == read
    )
    return "agrees" if agrees else "differs"


def roads_of(rows: Sequence[Row], ends: Sequence[Row]) -> list[list[str]]:
    """Return the road to each of some artifacts, as names from the source on."""
    inputs = {row.name: row.input for row in rows if row.report}
    roads = []
    for end in ends:
        road = [end.name]
        while road[0] in inputs:
            road.insert(0, inputs[road[0]])
        roads.append(road)
    return roads
