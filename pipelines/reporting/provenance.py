"""The proof chain of a run: which artifact each one was made from, by digest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import Artifact
from compress.common.errors import ArtifactInvalid

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from compress.pipelines.reporting.stage_rows import StageRow
    from compress.pipelines.results.schema import Report


@dataclass(frozen=True)
class ProofLink:
    """An artifact, the digest of its input, and whether its manifest on disk still agrees."""

    row: StageRow
    read: str
    """Digest of the artifact that it was made from; empty where the run's records lack it."""
    check: str
    """Manifest on disk against the report: `agrees`, `differs` or `not here`."""


def source_hashes(report: Report) -> dict[str, str]:
    """Return the hashes that identify the imported model and the data; unknown ones are missing."""
    lock: Any = report.lock
    parts = lock.get("source") or {}
    names = {"checkpoint": "checkpoint, SHA-256", "code": "code, SHA-256", "library": "library"}
    hashes = {names[key]: str(parts[key]) for key in names if parts.get(key)}
    if parts and not parts.get("checkpoint"):
        hashes["checkpoint"] = "none: the weights are the factory's own, from the seed"
    digest = (lock.get("artifacts") or {}).get("source")
    if digest:
        hashes["artifact, digest"] = digest
    if lock.get("data"):
        hashes["data, fingerprint"] = lock["data"]
    return hashes


def proof_chain(report: Report, rows: Sequence[StageRow], out: Path | None) -> list[ProofLink]:
    """Compare each artifact's manifest on disk (digest, file hash, input) with the report."""
    lock: Any = report.lock
    digests = dict(lock.get("artifacts") or {})
    digests |= {row.name: row.report.artifact.digest for row in rows if row.report}
    return [
        ProofLink(row, digests.get(row.input, ""), _check(row, digests.get(row.input), out))
        for row in rows
        if row.report
    ]


def _check(row: StageRow, read: str | None, out: Path | None) -> str:
    assert row.report
    if out is None:
        return "not here"
    try:
        found = Artifact.read_manifest(out / row.report.artifact.path)
    except ArtifactInvalid:
        return "not here"
    artifact, manifest = row.report.artifact, found.manifest
    file = manifest.files.get(artifact.file)
    agrees = (
        found.digest == artifact.digest
        and file is not None
        and file.sha256 == artifact.sha256
        and bool(manifest.lineage)
        and manifest.lineage[-1].inputs.get("input") == read
    )
    return "agrees" if agrees else "differs"


def lineage_paths(rows: Sequence[StageRow], ends: Sequence[StageRow]) -> list[list[str]]:
    """Return the stage names from the source to each of some artifacts."""
    inputs = {row.name: row.input for row in rows if row.report}
    paths = []
    for end in ends:
        path = [end.name]
        while path[0] in inputs:
            path.insert(0, inputs[path[0]])
        paths.append(path)
    return paths
