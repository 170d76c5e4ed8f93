"""What lies around an archive in the results of a run, for `compress verify`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from compress.core.artifact import Artifact
from compress.core.errors import ArtifactInvalid, CompressError, PipelineInvalid
from compress.core.files import sha256_of, write_atomically
from pipelines import catalog  # noqa: F401 - importing it makes every kind known
from pipelines.anchors import Given, anchors_of, anchors_of_file, run_around
from pipelines.pipeline import Pipeline
from pipelines.proof_page import as_text
from serve.archive import TorchServeArchive
from serve.attestation import signed, statement_of, subjects_of
from serve.proof import Evidence, Proof
from serve.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

    from compress.core.data import Splits


def prove(
    path: Path,
    given: Given = Given(),  # noqa: B008 - it is immutable
    *,
    report: Path | None = None,
    attest: Path | None = None,
    sign_key: Path | None = None,
) -> Proof:
    """Return what was proven of an artifact, and write it where that is asked for.

    Args:
        path: the artifact's directory, or a bare archive.
        given: what the user was told of it.
        report: file to write: a page where it ends in `.html`, text where in `.md`, else JSON.
        attest: file to write an in-toto attestation of the proof to.
        sign_key: private key that signs the attestation.

    Raises:
        CompressError: something does not match, or a file cannot be written; the message says.
    """
    if given.key is not None and given.attestation is None:
        raise PipelineInvalid("--key: checks a signature; give --attestation FILE too")
    if sign_key is not None and attest is None:
        raise PipelineInvalid("--sign-key: signs an attestation; give --attest FILE too")
    for option, file in (("--report", report), ("--attest", attest)):
        _refuse_place(option, file)
    run = run_around(path)
    if path.is_file():
        artifact, sha256 = None, sha256_of(path)
        anchors = anchors_of_file(path, sha256, given)
        proof = verify(path, sha256=given.sha256)
    else:
        artifact = Artifact.at(path)
        sha256 = artifact.manifest.files[artifact.payload_name].sha256
        anchors = anchors_of(artifact, given, run)  # before the pipeline's code runs
        proof = verify(path, sha256=given.sha256, evidence=partial(evidence_of, path))
    if (proof.digest, proof.sha256) != (artifact.digest if artifact else None, sha256):
        raise ArtifactInvalid(f"{path}: was changed while it was verified")
    proof = anchors.added_to(proof)
    if attest is not None:
        subjects = subjects_of(artifact) if artifact else {path.name: proof.sha256}
        lineage = artifact.manifest.lineage if artifact else ()
        statement = statement_of(subjects, lineage, proof, run.lock if run else None)
        content = signed(statement, sign_key) if sign_key else statement
        write_atomically(attest, content + b"\n")
    if report is not None:
        write_atomically(report, as_text(proof, path.name, report.suffix))
    return proof


def _refuse_place(option: str, file: Path | None) -> None:
    if file is not None and (file.is_dir() or not file.parent.is_dir()):
        found = "a directory is there" if file.is_dir() else f"{file.parent} is no directory"
        raise PipelineInvalid(f"{option} {file}: cannot be written, {found}")


def evidence_of(path: Path) -> Evidence | None:
    """Return what a run left around an archive; None where none did.

    The pipeline's data are loaded again: its own code runs, as in the run.
    """
    from pipelines.inputs import settle, source_parts  # imports torch, which few proofs need

    run = run_around(path)
    if run is None or not run.lock or not isinstance(Artifact.at(path), TorchServeArchive):
        return None
    artifacts = {artifact.digest: artifact for artifact in run.artifacts.values()}
    source: dict[str, Any] = {}
    data: Splits | None = None
    missing = ""
    try:
        pipeline, data, _ = settle(Pipeline.from_yaml(run.lock["file"]))
        source = source_parts(pipeline)
        if data is None or "val" not in data.datasets:
            data, missing = None, "the pipeline has none"
        elif data.fingerprint() != run.lock["data"]:
            data, missing = None, "the data are not those of the run any more"
    except (CompressError, OSError, ValueError, KeyError) as error:
        missing = f"{type(error).__name__}: {error}"
    return Evidence(artifacts=artifacts, source=source, data=data, missing=missing)
