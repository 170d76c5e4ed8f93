"""Verify an artifact: every hash, its origin, and for a ``.mar`` its served outputs."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from compress.artifacts.artifact import Artifact
from compress.common.atomic_files import sha256_of
from compress.serve.packaging.provenance import PROVENANCE, Provenance
from compress.serve.torchserve.artifact import (
    TorchServeArchive,
    check_bare_mar,
    refuse_unknown_file,
    refuse_wrong_artifact_hash,
    refuse_wrong_hash,
)
from compress.serve.verify import Evidence, Proof, prove_answers, prove_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ARTIFACT_MODULES = (
    "compress.artifacts.eager_model",
    "compress.artifacts.graph_model",
    "compress.export.aotinductor.stage",
    "compress.export.onnx.stage",
    "compress.export.torchscript.stage",
    "compress.serve.repository.kserve",
    "compress.serve.repository.triton",
)
"""Modules whose import registers the artifact kinds that a manifest may name."""
NATIVE = (
    "that it answers: its model is native code, which cannot be inspected, so it was not started; "
    "give the archive's sha256, from a source that you trust, with --sha256, or --replay for a run "
    "that you trust"
)


def verify(
    path: Path | str,
    *,
    sha256: str | None = None,
    evidence: Callable[[], Evidence | None] = lambda: None,
    trusted: bool = False,
) -> Proof:
    """Verify an artifact's directory, or a ``.mar`` without its directory.

    A single ``.mar`` is checked only against its own record: compare its SHA-256 with a trusted
    one. An archive is started only if its code is the handler that this version ships.

    Args:
        path: the directory or the file.
        sha256: expected SHA-256 of the deployed file, or digest of the artifact, if known.
        evidence: loads the run's other artifacts and its validation split. It is called after
            every hash was checked, as it may run the pipeline's code.
        trusted: start an archive of native code even without `sha256`.

    Raises:
        ArtifactInvalid: a file or member does not match; the message names it.
        StageFailed: the served model does not become ready.
    """
    mar = path = Path(path)
    run_evidence: Evidence | None = None
    if path.is_file():
        refuse_unknown_file(path, "verify")
        refuse_wrong_hash(path, sha256)
        members, origin = check_bare_mar(path)
        digest = sha256_of(path)
        advice = "as expected" if sha256 else "compare it with the one that you were given"
        lines = (f"{path.name}: sha256 {digest}; {advice}", *_member_lines(members, origin))
        proof = Proof(kind=TorchServeArchive.kind, sha256=digest, proven=lines)
    else:
        for module in ARTIFACT_MODULES:
            import_module(module)
        artifact = Artifact.from_directory(path)
        refuse_wrong_artifact_hash(artifact, sha256)
        if not isinstance(artifact, TorchServeArchive):
            artifact.verify()
            return _proof_of_files(artifact)
        mar = artifact.payload_path
        members, origin = artifact.check()
        proof = _proof_of_files(artifact).with_lines(*_member_lines(members, origin))
        run_evidence = evidence()
    proof = prove_chain(proof, origin, run_evidence, str(mar))
    if origin.artifact.kind == "aot" and not trusted and sha256 is None:
        return proof.lacking(NATIVE)
    return prove_answers(proof, mar, members, origin, run_evidence)


def _proof_of_files(artifact: Artifact) -> Proof:
    """Return the proof of an artifact whose files' hashes were checked."""
    files = artifact.manifest.files
    lines = [f"{artifact.kind} artifact, digest {artifact.digest}"]
    for name, file in files.items():
        lines.append(f"{name}: {file.bytes} bytes, sha256 {file.sha256}, as sealed")
    for step in artifact.manifest.lineage:
        read = ", ".join(f"{role} {digest}" for role, digest in step.inputs.items())
        lines.append(f"{step.stage} read {read or 'nothing'}")
    payload = files[artifact.payload_name].sha256
    return Proof(kind=artifact.kind, sha256=payload, digest=artifact.digest, proven=tuple(lines))


def _member_lines(members: Mapping[str, bytes], origin: Provenance) -> list[str]:
    packed = origin.artifact
    traced = f", traced from eager artifact {packed.traced_from}" if packed.traced_from else ""
    return [
        f"{len(members)} members have safe names; {len(origin.members)} hash to what "
        f"{PROVENANCE} records",
        f"{packed.payload} is the payload of {packed.kind} artifact {packed.digest}{traced}",
    ]
