"""`compress verify`: check an artifact against its manifest, its run and recorded answers.

A forged manifest agrees with its forged files, so the manifest alone proves little. Anchors are
evidence outside an artifact's folder that names its digest: the run's `report.json` and
`lock.json`, manifests of artifacts made from it, a signed attestation, or the user's `--sha256`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from compress.artifacts.artifact import MANIFEST, Artifact
from compress.common.atomic_files import sha256_of, write_atomically
from compress.common.errors import ArtifactInvalid, CompressError, PipelineInvalid
from compress.common.printable import markdown_text
from compress.common.sealed_json import LOCK, read_report
from compress.core.verdict import explain
from compress.pipelines.config.pipeline import PipelineConfig
from compress.pipelines.system.templates import render_template
from compress.serve.attestation import (
    Certificate,
    read_attestation,
    sign_model,
    signed,
    statement_of,
    subjects_of,
)
from compress.serve.packaging.model_interface import REPORT
from compress.serve.torchserve.artifact import TorchServeArchive
from compress.serve.verify import Evidence, Proof, verify

if TYPE_CHECKING:
    from compress.data.splits import Splits
    from compress.serve.attestation import Attestation

NO_REPLAY = (
    "not asked again, nor are the source's files hashed; --replay does both, and runs the code of "
    "the pipeline file that lock.json names: give it only where you trust the whole folder"
)
ARTIFACTS_FOLDER = "artifacts"
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
    verdicts: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Stage → its verdicts in `report.json`."""

    @property
    def artifacts(self) -> dict[str, Artifact]:
        """Artifacts of the run by stage, from their manifests; unreadable ones are missing."""
        folder, artifacts = self.folder / ARTIFACTS_FOLDER, {}
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            with suppress(ArtifactInvalid):
                artifacts[path.name] = Artifact.read_manifest(path)
        return artifacts

    def refuse_damaged_ancestors(self) -> None:
        """Raise ArtifactInvalid if what the artifact was made from is here, and not as sealed."""
        stage, folder = self.name, self.folder / ARTIFACTS_FOLDER
        for _ in self.inputs:  # a report may say that stages read each other's results in a circle
            stage = self.inputs.get(stage, "")
            if stage and (folder / stage / MANIFEST).exists():
                Artifact.read_manifest(folder / stage)


def find_enclosing_run(path: Path) -> EnclosingRun | None:
    """Find the run whose results contain an artifact; None if there is none."""
    folder = path.resolve().parent
    out = folder.parent
    if path.is_file() or folder.name != ARTIFACTS_FOLDER:
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
        verdicts = {row["name"]: row.get("verdicts", ()) for row in rows}
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactInvalid(f"{out}: holds no readable report ({error})") from error
    return EnclosingRun(out, path.resolve().name, digests, inputs, lock, verdicts)


def check_anchors(artifact: Artifact, given: VerifierInputs, run: EnclosingRun | None) -> Anchors:
    """Check an artifact's digest against its run and the user's inputs; return the anchors."""
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
    """Read the attestation that the user gives, and add what it is to the anchors."""
    found = read_attestation(file, key)
    signed = f"signed by key {found.signed_by[:16]}" if found.signed_by else "unsigned"
    if not found.signed_by:
        anchors.unproven.append(
            f"who wrote {file.name}: no signature was checked; give the key with --key"
        )
    anchors.names.append(f"{file.name} ({found.predicate_type}, {signed})")
    for certificate in found.certificates:
        for verdict in certificate.verdicts:
            line = f"{file.name}, {signed}, on data {certificate.data[:12]}: {explain(verdict)}"
            line = line.replace("\n", r"\n")  # a text of another's could forge a line
            if found.signed_by and verdict.passed:
                anchors.proven.append(f"certified: {line}")
            else:
                anchors.unproven.append(line)
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


def verify_command(
    path: Path,
    given: VerifierInputs = VerifierInputs(),
    *,
    report: Path | None = None,
    attest: Path | None = None,
    model_signature: Path | None = None,
    sign_key: Path | None = None,
    replay: bool = False,
    certificates: Sequence[Certificate] = (),
) -> Proof:
    """Verify an artifact or a bare archive, by what the user expects of it; write files if given.

    Args:
        path: the artifact's directory, or an archive.
        given: hash, attestation and key from the user.
        report: file of the proof: a page where it ends in `.html`, text where in `.md`, else JSON.
        attest: file of an in-toto attestation of the proof.
        model_signature: file of a signature that OpenSSF's `model_signing` verifies.
        sign_key: private key that signs both.
        replay: whether the pipeline's code runs, to hash the model's sources and ask an archive for
            the validation split, and native code is started whose hash was not given.
        certificates: verdicts that the attestation states besides those of the run.
    """
    written = {"report": report, "attest": attest, "model-signature": model_signature}
    check_options(path, written, sign_key, given)
    run = find_enclosing_run(path)
    if path.is_file():
        artifact, sha256 = None, sha256_of(path)
        anchors = check_file_anchors(path, sha256, given)
        proof = verify(path, sha256=given.sha256, trusted=replay)
    else:
        artifact = Artifact.from_directory(path)
        sha256 = artifact.manifest.files[artifact.payload_name].sha256
        anchors = check_anchors(artifact, given, run)  # before the pipeline's code runs
        around = partial(load_evidence, path, replay)
        proof = verify(path, sha256=given.sha256, evidence=around, trusted=replay)
    if (proof.digest, proof.sha256) != (artifact.digest if artifact else None, sha256):
        raise ArtifactInvalid(f"{path}: was changed while it was verified")
    unproven = (*proof.unproven, *anchors.unproven)
    proof = proof.with_lines(*anchors.proven, anchors=tuple(anchors.names), unproven=unproven)
    subjects = subjects_of(artifact) if artifact else {path.name: proof.sha256}
    contents: dict[Path, bytes | str] = {}
    if attest is not None:
        lineage = artifact.manifest.lineage if artifact else ()
        if run and (own := run.verdicts.get(run.name)):
            own_certificate = {"data": run.lock.get("data") or "", "verdicts": own}
            try:
                certificates = (Certificate.model_validate(own_certificate), *certificates)
            except ValidationError as error:
                raise ArtifactInvalid(
                    f"{run.folder / REPORT}: verdicts of {run.name} are of another version; attest "
                    "with the one that wrote them, or run the pipeline again"
                ) from error
        lock = run.lock if run else None
        statement = statement_of(subjects, lineage, proof, lock, certificates)
        contents[attest] = (signed(statement, sign_key) if sign_key else statement) + b"\n"
    if model_signature is not None and sign_key is not None:
        contents[model_signature] = sign_model(path.resolve().name, subjects, sign_key) + b"\n"
    if report is not None:
        contents[report] = render_proof(proof, path.name, report.suffix)
    for file, content in contents.items():
        write_atomically(file, content)
    return proof


def check_options(
    path: Path,
    written: Mapping[str, Path | None],
    sign_key: Path | None,
    given: VerifierInputs = VerifierInputs(),
) -> None:
    """Refuse options of :func:`verify_command` that lack another, and files not to be written.

    `written` has the files that are to be written, by option.
    """
    signs_model = written.get("model-signature") is not None
    if given.key is not None and given.attestation is None:
        raise PipelineInvalid("--key: checks a signature; give --attestation FILE too")
    if sign_key is not None and not signs_model and written.get("attest") is None:
        raise PipelineInvalid(
            "--sign-key: signs an attestation or a model; give --attest FILE or --model-signature "
            "FILE too"
        )
    if signs_model and (sign_key is None or path.is_file()):
        raise PipelineInvalid(
            "--model-signature: signs the files of an artifact's folder; give the folder and "
            "--sign-key KEY"
        )
    # No output may replace an input, or another output.
    taken = {file.resolve() for file in (path, given.attestation, given.key, sign_key) if file}
    for option, file in written.items():
        if file is not None:
            _check_output_path(f"--{option}", file, taken)
            taken.add(file.resolve())


def _check_output_path(option: str, file: Path, taken: set[Path]) -> None:
    """Refuse an output file that cannot be written, or would overwrite an input or artifact."""
    place = file.resolve()
    if file.is_dir():
        found = "a directory is there"
    elif not file.parent.is_dir():
        found = f"{file.parent} is not a directory"
    elif place in taken:
        found = "another option names that file, too"
    elif any((folder / MANIFEST).is_file() for folder in place.parents):
        found = "it lies in an artifact, which holds its sealed files alone"
    else:
        return
    raise PipelineInvalid(f"{option} {file}: cannot be written, {found}")


def load_evidence(path: Path, replay: bool) -> Evidence | None:
    """Load the run's artifacts, sources and data that an archive can be checked against, if any.

    With `replay` the pipeline file that `lock.json` names is loaded: its own code runs.
    """
    run = find_enclosing_run(path)
    if run is None or not run.lock:
        return None
    if not isinstance(Artifact.from_directory(path), TorchServeArchive):
        return None
    artifacts = {artifact.digest: artifact for artifact in run.artifacts.values()}
    if not replay:
        return Evidence(artifacts, source={}, data=None, missing=NO_REPLAY)
    # It imports torch, which few proofs need.
    from compress.pipelines.runner.inputs import resolve_inputs, source_parts

    source: dict[str, Any] = {}
    data: Splits | None = None
    missing = ""
    try:
        pipeline, data, _ = resolve_inputs(PipelineConfig.from_yaml(run.lock["file"]))
        source = source_parts(pipeline, data)
        if data is None or "val" not in data.datasets:
            data, missing = None, "the pipeline has none"
        elif data.fingerprint() != run.lock["data"]:
            data, missing = None, "the data are not those of the run any more"
    except (CompressError, OSError, ValueError, KeyError) as error:
        missing = f"{type(error).__name__}: {error}"
    return Evidence(artifacts=artifacts, source=source, data=data, missing=missing)


def render_proof(proof: Proof, name: str, ending: str) -> str:
    """Render a proof of an artifact as `.html`, as `.md`, or with another ending as JSON."""
    if ending == ".html":
        return render_template("proof.html.jinja", proof=proof, name=name, verdict=_verdict(proof))
    if ending != ".md":
        return json.dumps(proof.model_dump(mode="json"), indent=1) + "\n"
    about = [f"kind: {proof.kind}", f"SHA-256 of the file: `{proof.sha256}`"]
    about += [f"digest of the artifact: `{proof.digest}`"] if proof.digest else []
    about.append(f"answered by: {proof.served_by or 'nothing was started'}")
    parts = [f"# {markdown_text(name)}", f"**{_verdict(proof)}.**", _listed(about)]
    parts += ["## Proven", _listed(proof.proven)]
    if proof.unproven:
        parts += ["## Not proven", _listed(proof.unproven)]
    if proof.replays:
        rows = [
            f"| {markdown_text(r.what)} | {r.samples} | {r.largest_difference:.3g} |"
            for r in proof.replays
        ]
        table = ["| answered again | samples | largest difference |", "|---|---:|---:|", *rows]
        parts += ["## Answers", "\n".join(table)]
    return "\n\n".join(parts) + "\n"


def _verdict(proof: Proof) -> str:
    left = len(proof.unproven)
    if left:
        what = "one thing" if left == 1 else f"{left} things"
        return f"✓ Nothing contradicts it; {what} could not be shown"
    return "✓ It answers as recorded" if proof.served_by else "✓ As it was sealed; not started"


def _listed(lines: list[str] | tuple[str, ...]) -> str:
    return "\n".join(f"- {markdown_text(line)}" for line in lines)
