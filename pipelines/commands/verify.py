"""`compress verify`: check an artifact against its manifest, its run and recorded answers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import MANIFEST, Artifact
from compress.common.atomic_files import sha256_of, write_atomically
from compress.common.errors import ArtifactInvalid, CompressError, PipelineInvalid
from pipelines.commands.verify_anchors import (
    VerifierInputs,
    check_anchors,
    check_file_anchors,
    find_enclosing_run,
)
from pipelines.config.pipeline import PipelineConfig
from pipelines.reporting.verification_page import render_proof
from serve.attestation import sign_model, signed, statement_of, subjects_of
from serve.torchserve.artifact import TorchServeArchive
from serve.verify import Evidence, Proof, verify

if TYPE_CHECKING:
    from pathlib import Path

    from compress.data.splits import Splits

NO_REPLAY = (
    "not asked again, nor are the source's files hashed; --replay does both, and runs the code of "
    "the pipeline file that lock.json names: give it only where you trust the whole folder"
)


def verify_command(
    path: Path,
    given: VerifierInputs = VerifierInputs(),  # noqa: B008 - it is immutable
    *,
    report: Path | None = None,
    attest: Path | None = None,
    model_signature: Path | None = None,
    sign_key: Path | None = None,
    replay: bool = False,
) -> Proof:
    """Verify an artifact or archive; write the proof and an attestation if files are given.

    Args:
        path: the artifact's directory, or a bare archive.
        given: hash, attestation and key from the user.
        report: file to write: a page where it ends in `.html`, text where in `.md`, else JSON.
        attest: file to write an in-toto attestation of the proof to.
        model_signature: file to write a signature to that OpenSSF's `model_signing` verifies.
        sign_key: private key that signs both.
        replay: whether the pipeline's code runs, to hash the model's sources and ask an archive for
            the validation split, and native code is started whose hash was not given.
    """
    if given.key is not None and given.attestation is None:
        raise PipelineInvalid("--key: checks a signature; give --attestation FILE too")
    if sign_key is not None and attest is None and model_signature is None:
        raise PipelineInvalid(
            "--sign-key: signs an attestation or a model; give --attest FILE or --model-signature "
            "FILE too"
        )
    if model_signature is not None and (sign_key is None or path.is_file()):
        raise PipelineInvalid(
            "--model-signature: signs the files of an artifact's folder; give the folder and "
            "--sign-key KEY"
        )
    # No output may replace an input, or another output.
    taken = {file.resolve() for file in (path, given.attestation, given.key, sign_key) if file}
    written = {"--report": report, "--attest": attest, "--model-signature": model_signature}
    for option, file in written.items():
        if file is not None:
            _check_output_path(option, file, taken)
            taken.add(file.resolve())
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
    proof = anchors.added_to(proof)
    subjects = subjects_of(artifact) if artifact else {path.name: proof.sha256}
    contents: dict[Path, bytes | str] = {}
    if attest is not None:
        lineage = artifact.manifest.lineage if artifact else ()
        statement = statement_of(subjects, lineage, proof, run.lock if run else None)
        contents[attest] = (signed(statement, sign_key) if sign_key else statement) + b"\n"
    if model_signature is not None and sign_key is not None:
        contents[model_signature] = sign_model(path.resolve().name, subjects, sign_key) + b"\n"
    if report is not None:
        contents[report] = render_proof(proof, path.name, report.suffix)
    for file, content in contents.items():
        write_atomically(file, content)
    return proof


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
    if (
        run is None
        or not run.lock
        or not isinstance(Artifact.from_directory(path), TorchServeArchive)
    ):
        return None
    artifacts = {artifact.digest: artifact for artifact in run.artifacts.values()}
    if not replay:
        return Evidence(artifacts, source={}, data=None, missing=NO_REPLAY)
    # It imports torch, which few proofs need.
    from pipelines.runner.inputs import resolve_inputs, source_parts

    source: dict[str, Any] = {}
    data: Splits | None = None
    missing = ""
    try:
        pipeline, data, _ = resolve_inputs(PipelineConfig.from_yaml(run.lock["file"]))
        source = source_parts(pipeline)
        if data is None or "val" not in data.datasets:
            data, missing = None, "the pipeline has none"
        elif data.fingerprint() != run.lock["data"]:
            data, missing = None, "the data are not those of the run any more"
    except (CompressError, OSError, ValueError, KeyError) as error:
        missing = f"{type(error).__name__}: {error}"
    return Evidence(artifacts=artifacts, source=source, data=data, missing=missing)
