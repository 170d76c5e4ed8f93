"""Proving an artifact again: every hash, its origin, and for a ``.mar`` that it still answers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from compress.artifacts.artifact import Artifact
from compress.common.atomic_files import sha256_of
from serve.packaging.provenance import PROVENANCE, Provenance
from serve.torchserve.answer_check import Evidence, Proof, prove_answers, prove_chain
from serve.torchserve.artifact import (
    TorchServeArchive,
    check_bare_mar,
    refuse_unknown_file,
    refuse_wrong_artifact_hash,
    refuse_wrong_hash,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ARTIFACT_MODULES = (
    "compress.artifacts.eager_model",
    "compress.artifacts.graph_model",
    "export.aotinductor.stage",
    "export.onnx.stage",
    "export.torchscript.stage",
    "serve.repository.kserve",
    "serve.repository.triton",
)
NATIVE = (
    "that it answers: its model is native code, which runs unseen, so it was not started; give the "
    "archive's sha256, as you were told it, with --sha256, or --replay for a run that you trust"
)


def verify(
    path: Path | str,
    *,
    sha256: str | None = None,
    evidence: Callable[[], Evidence | None] = lambda: None,
    trusted: bool = False,
) -> Proof:
    """Return what was proven of an artifact's directory, or of a bare ``.mar``.

    A bare ``.mar`` vouches for itself alone: compare its SHA-256 with the one you were given. An
    archive is started only if its code is the handler that this version ships.

    Args:
        path: the directory or the file.
        sha256: what the deployed file must hash to, or an artifact's digest, where you were told.
        evidence: gives what lies around an artifact of a run: its ancestors and the validation
            split. It is called once every hash is found right, as it may run the pipeline's code.
        trusted: whether an archive of native code is started without its hash being given, too.

    Raises:
        ArtifactInvalid: a file or member does not match; the message names it.
        StageFailed: the served model does not become ready.
    """
    path = Path(path)
    starts_native = trusted or sha256 is not None
    if path.is_file():
        refuse_unknown_file(path, "verify")
        refuse_wrong_hash(path, sha256)
        return _prove_bare(path, sha256, starts_native)
    _know_every_kind()
    artifact = Artifact.from_directory(path)
    refuse_wrong_artifact_hash(artifact, sha256)
    if isinstance(artifact, TorchServeArchive):
        return _prove_archive(artifact, evidence, starts_native)
    artifact.verify()
    return _of_files(artifact)


def _of_files(artifact: Artifact) -> Proof:
    """Return what is proven once every file was hashed."""
    files = artifact.manifest.files
    lines = (
        f"{artifact.kind} artifact, digest {artifact.digest}",
        *(f"{name}: {f.bytes} bytes, sha256 {f.sha256}, as sealed" for name, f in files.items()),
        *lineage_lines(artifact),
    )
    payload = files[artifact.payload_name].sha256
    return Proof(kind=artifact.kind, sha256=payload, digest=artifact.digest, proven=lines)


def _prove_archive(
    artifact: TorchServeArchive, evidence: Callable[[], Evidence | None], starts_native: bool
) -> Proof:
    mar = artifact.payload_path
    members, origin = artifact.check()
    proof = _of_files(artifact).with_lines(*_member_lines(members, origin))
    around = evidence()
    proof = prove_chain(proof, origin, around, str(mar))
    if origin.artifact.kind == "aot" and not starts_native:
        return proof.lacking(NATIVE)
    return prove_answers(proof, mar, members, origin, around)


def _prove_bare(mar: Path, given: str | None, starts_native: bool) -> Proof:
    members, origin = check_bare_mar(mar)
    sha256 = sha256_of(mar)
    told = "as you were told" if given else "compare it with the one you were given"
    lines = (f"{mar.name}: sha256 {sha256}; {told}", *_member_lines(members, origin))
    proof = Proof(kind=TorchServeArchive.kind, sha256=sha256, proven=lines)
    proof = prove_chain(proof, origin, None, str(mar))
    if origin.artifact.kind == "aot" and not starts_native:
        return proof.lacking(NATIVE)
    return prove_answers(proof, mar, members, origin, None)


def lineage_lines(artifact: Artifact) -> list[str]:
    """Return one line for each stage that led to an artifact."""
    lines = []
    for step in artifact.manifest.lineage:
        read = ", ".join(f"{role} {digest}" for role, digest in step.inputs.items())
        lines.append(f"{step.stage} read {read or 'nothing'}")
    return lines


def _member_lines(members: Mapping[str, bytes], origin: Provenance) -> list[str]:
    packed = origin.artifact
    traced = f", traced from eager artifact {packed.traced_from}" if packed.traced_from else ""
    return [
        f"{len(members)} members have safe names; {len(origin.members)} hash to what "
        f"{PROVENANCE} records",
        f"{packed.payload} is the payload of {packed.kind} artifact {packed.digest}{traced}",
    ]


def _know_every_kind() -> None:
    """Import the artifact types, so that a manifest's kind is recognised."""
    for module in ARTIFACT_MODULES:
        import_module(module)
