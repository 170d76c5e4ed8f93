"""Anchors of `compress verify`: evidence outside an artifact's folder that names its digest.

A forged manifest agrees with its forged files, so the manifest alone proves little. Independent
evidence is the run's `report.json` and `lock.json`, the manifests of artifacts made from it, a
signed attestation, or a hash that the user passes with `--sha256`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import MANIFEST, Artifact
from compress.common.errors import ArtifactInvalid
from compress.common.sealed_json import LOCK, read_report
from compress.serve.attestation import read_attestation, subjects_of
from compress.serve.packaging.recorded_measurements import REPORT
from compress.serve.torchserve.artifact import TorchServeArchive

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from compress.serve.attestation import Attestation
    from compress.serve.verify import Proof

ARTIFACTS = "artifacts"
NO_ANCHOR = (
    "an anchor: this shows only that {what} is consistent with {itself}; give the {hash} that you "
    "expect with --sha256, or a signed attestation with --attestation and --key"
)


@dataclass
class Anchors:
    """Names of the anchors found, and lines of what they prove and leave unproven."""

    names: list[str] = field(default_factory=list)
    proven: list[str] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    def added_to(self, proof: Proof) -> Proof:
        """Return a proof with these anchors and lines added."""
        proof = proof.with_lines(*self.proven, anchors=tuple(self.names))
        for line in self.unproven:
            proof = proof.lacking(line)
        return proof


@dataclass(frozen=True)
class VerifierInputs:
    """What the user expects of the artifact: options of `compress verify`."""

    sha256: str | None = None
    """SHA-256 of the deployed file, or the artifact's digest."""
    attestation: Path | None = None
    """A file that must name the artifact."""
    key: Path | None = None
    """The public key that must have signed it."""


@dataclass(frozen=True)
class EnclosingRun:
    """The run whose results folder contains an artifact."""

    folder: Path
    name: str
    """Stage that made the artifact: the name of its folder."""
    digests: Mapping[str, Mapping[str, str]]
    """Record (`report.json`, `lock.json`) → stage → digest."""
    inputs: Mapping[str, str]
    """Stage → the stage whose artifact it read."""
    lock: Mapping[str, Any]
    """`lock.json`."""

    @property
    def artifacts(self) -> dict[str, Artifact]:
        """Artifacts of the run by stage, from their manifests; unreadable ones are missing."""
        folder, artifacts = self.folder / ARTIFACTS, {}
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            with suppress(ArtifactInvalid):
                artifacts[path.name] = Artifact.read_manifest(path)
        return artifacts

    def refuse_damaged_ancestors(self) -> None:
        """Raise ArtifactInvalid if what the artifact was made from is here, and not as sealed."""
        stage: str | None = self.name
        for _ in self.inputs:  # a report may say that stages read each other's results in a circle
            stage = self.inputs.get(stage) if stage is not None else None
            if stage is not None and (self.folder / ARTIFACTS / stage / MANIFEST).exists():
                Artifact.read_manifest(self.folder / ARTIFACTS / stage)


def find_enclosing_run(path: Path) -> EnclosingRun | None:
    """Find the run whose results contain an artifact; None if there is none.

    Raises:
        ArtifactInvalid: the run's records are incomplete, or were changed since it wrote them.
    """
    folder = path.resolve().parent
    out = folder.parent
    if path.is_file() or folder.name != ARTIFACTS:
        return None
    present = [name for name in (REPORT, LOCK) if (out / name).exists()]
    if not present:
        return None
    if len(present) == 1:
        raise ArtifactInvalid(
            f"{out}: has {present[0]} alone, and only {REPORT} and {LOCK} together show what a run "
            "made; run the pipeline again"
        )
    try:
        report, lock = read_report(out / REPORT)
        rows = report["stages"]
        digests = {
            REPORT: {row["name"]: row["artifact"]["digest"] for row in rows},
            LOCK: dict(lock["artifacts"]),
        }
        inputs = {row["name"]: row["input"] for row in rows}
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactInvalid(f"{out}: holds no readable report ({error})") from error
    return EnclosingRun(out, path.resolve().name, digests, inputs, lock)


def check_anchors(artifact: Artifact, given: VerifierInputs, run: EnclosingRun | None) -> Anchors:
    """Check an artifact's digest against its run and the user's inputs; return the anchors.

    Raises:
        ArtifactInvalid: an anchor names another artifact, or an artifact that it was made from
            was changed; the message names it.
    """
    anchors = Anchors()
    if run is not None:
        run.refuse_damaged_ancestors()
        naming = [record for record, digests in run.digests.items() if run.name in digests]
        for record in naming:
            _require_digest(artifact, run.digests[record][run.name], run.folder / record)
        for name, other in run.artifacts.items():
            lineage = other.manifest.lineage
            if run.inputs.get(name) == run.name and lineage:
                _require_digest(artifact, lineage[-1].inputs.get("input"), other.path / MANIFEST)
        if naming:
            anchors.names += naming
            names = " and ".join(naming)
            anchors.proven.append(f"anchor: {names} of {run.folder.name} name this digest")
        if not isinstance(artifact, TorchServeArchive):  # whose ancestors `prove_chain` checks
            _check_ancestors(anchors, artifact, run)
    if given.attestation is not None:
        attestation = _read_attestation(anchors, given.attestation, given.key)
        attestation.require_all_of(subjects_of(artifact), artifact.path)
        anchors.proven.append(f"anchor: {anchors.names[-1]} names this digest and every file")
    payload = artifact.payload_name
    digest_named = bool(anchors.names)
    if given.sha256 is not None:
        named = {artifact.digest: "this digest", artifact.manifest.files[payload].sha256: payload}
        what = named.get(given.sha256.lower())
        if what is None:
            raise ArtifactInvalid(
                f"{artifact.path}: --sha256 names neither its digest {artifact.digest} nor the "
                f"sha256 of {payload}"
            )
        anchors.names.append("--sha256")
        anchors.proven.append(f"anchor: --sha256 names {what}")
        digest_named |= what != payload
    other_files = [name for name in artifact.manifest.files if name != payload]
    if not anchors.names:
        words = {"what": "the folder", "itself": "its own manifest", "hash": "artifact's digest"}
        anchors.unproven.append(NO_ANCHOR.format(**words))
    elif not digest_named:
        files = f"of the manifest{f' and {len(other_files)} more files' if other_files else ''}"
        anchors.unproven.append(f"an anchor {files}: only {payload} is named; give the digest")
    return anchors


def check_file_anchors(file: Path, sha256: str, given: VerifierInputs) -> Anchors:
    """Check the hash of a bare archive against the user's inputs; return the anchors."""
    anchors = Anchors()
    if given.attestation is not None:
        attestation = _read_attestation(anchors, given.attestation, given.key)
        # It may have been renamed, but not to the name of another file.
        same = sorted(name for name, digest in attestation.subjects if digest == sha256)
        is_known = not same or file.name in dict(attestation.subjects)
        attestation.require_all_of({file.name if is_known else same[0]: sha256}, file)
        anchors.proven.append(f"anchor: {anchors.names[-1]} names {file.name}")
    if given.sha256 is not None:
        if sha256 != given.sha256.lower():
            raise ArtifactInvalid(f"{file}: sha256 is {sha256}, expected {given.sha256}")
        anchors.names.append("--sha256")
        anchors.proven.append(f"anchor: --sha256 names {file.name}")
    if not anchors.names:
        words = {"what": "the file", "itself": "itself", "hash": "file's hash"}
        anchors.unproven.append(NO_ANCHOR.format(**words))
    return anchors


def _read_attestation(anchors: Anchors, file: Path, key: Path | None) -> Attestation:
    """Read the attestation that the user gives, and add it to the anchors' names.

    One whose signature is not checked adds a line to `anchors.unproven`.
    """
    found = read_attestation(file, key)
    signed = f"signed by key {found.signed_by[:16]}" if found.signed_by else "unsigned"
    if not found.signed_by:
        anchors.unproven.append(
            f"who wrote {file.name}: no signature was checked; give the key with --key"
        )
    anchors.names.append(f"{file.name} ({found.predicate_type}, {signed})")
    return found


def _require_digest(artifact: Artifact, digest: object, source: Path) -> None:
    if digest != artifact.digest:
        raise ArtifactInvalid(
            f"{artifact.path}: has digest {artifact.digest}, and {source} names {digest}: it is "
            "not the artifact that the run made"
        )


def _check_ancestors(anchors: Anchors, artifact: Artifact, run: EnclosingRun) -> None:
    """Verify the artifacts that one was made from against its lineage, if they are present."""
    siblings = run.artifacts
    by_digest = {other.digest: (name, other) for name, other in siblings.items()}
    names = {digest: name for known in run.digests.values() for name, digest in known.items()}
    lineage = artifact.manifest.lineage
    needed = {
        (role, digest): place
        for place, step in enumerate(lineage)
        for role, digest in step.inputs.items()
    }
    absent = []
    for (role, digest), place in needed.items():
        name, ancestor = by_digest.get(digest, (names.get(digest, digest[:12]), None))
        if ancestor is None:
            if name in siblings:
                _require_digest(siblings[name], digest, artifact.path / MANIFEST)
            absent.append(name)
            continue
        ancestor.verify()
        # A teacher's lineage is its own.
        if role == "input" and ancestor.manifest.lineage != lineage[:place]:
            raise ArtifactInvalid(
                f"{artifact.path / MANIFEST}: its lineage is not that of {name}, which it was made "
                "of, with one stage more"
            )
    if needed:
        here = f"{len(needed) - len(absent)} of the {len(needed)} artifacts"
        anchors.proven.append(f"{here} that it was made of are here, as sealed")
    if absent:
        anchors.unproven.append(f"{', '.join(absent)}: not here")
