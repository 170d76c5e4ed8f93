"""Proving an artifact again: every hash, its origin, and for a ``.mar`` that it still answers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from compress.core.artifact import Artifact
from compress.core.errors import ArtifactInvalid
from compress.core.files import sha256_of
from serve.archive import PROBE, TorchServeArchive, refuse_bare, refuse_other
from serve.joined import handler_text
from serve.mar import CONFIG, HANDLER, MAR_MANIFEST, mar_manifest, model_name_of, read_mar
from serve.proof import Evidence, Proof, prove_answers, prove_chain
from serve.provenance import PROVENANCE, Provenance, digest_of, refuse_broken_chain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ARTIFACT_MODULES = (
    "compress.core.eager",
    "compress.core.graph",
    "export.aot",
    "export.onnx",
    "export.torchscript",
    "serve.kserve",
    "serve.triton",
)
NATIVE = (
    "that it answers: its model is native code, which runs unseen, so it was not started; give the "
    "archive's sha256, as you were told it, with --sha256"
)


def verify(
    path: Path | str,
    *,
    sha256: str | None = None,
    evidence: Callable[[], Evidence | None] = lambda: None,
) -> Proof:
    """Return what was proven of an artifact's directory, or of a bare ``.mar``.

    A bare ``.mar`` vouches for itself alone: compare its SHA-256 with the one you were given. An
    archive is started only if its code is the handler that this version ships.

    Args:
        path: the directory or the file.
        sha256: what the deployed file must hash to, where you were told.
        evidence: gives what lies around an artifact of a run: its ancestors and the validation
            split. It is called once every hash is found right, as it may run the pipeline's code.

    Raises:
        ArtifactInvalid: a file or member does not match; the message names it.
        StageFailed: the served model does not become ready.
    """
    path = Path(path)
    if path.is_file():
        refuse_bare(path, "verify")
        refuse_other(path, sha256)
        return _prove_bare(path, trusted=sha256 is not None)
    _know_every_kind()
    artifact = Artifact.at(path)
    refuse_other(artifact.payload_path, sha256)
    if isinstance(artifact, TorchServeArchive):
        return _prove_archive(artifact, evidence)
    return _prove_files(artifact)


def _prove_files(artifact: Artifact) -> Proof:
    artifact.verify()
    files = artifact.manifest.files
    lines = (
        f"{artifact.kind} artifact, digest {artifact.digest}",
        *(f"{name}: {f.bytes} bytes, sha256 {f.sha256}, as sealed" for name, f in files.items()),
        *lineage_lines(artifact),
    )
    payload = files[artifact.payload_name].sha256
    return Proof(kind=artifact.kind, sha256=payload, digest=artifact.digest, proven=lines)


def _prove_archive(artifact: TorchServeArchive, evidence: Callable[[], Evidence | None]) -> Proof:
    mar = artifact.payload_path
    if not mar.is_file():
        raise ArtifactInvalid(f"{artifact.path}: {artifact.payload} is missing")
    members = read_mar(mar)
    origin = check_members(members, str(mar))  # first: it names the member
    recorded = artifact.manifest.facts.get("provenance")
    if digest_of(members[PROVENANCE]).sha256 != recorded:
        raise ArtifactInvalid(f"{mar}: member {PROVENANCE} is not the one that was sealed")
    proof = _prove_files(artifact)
    check_code(members, origin, mar)
    packaged = artifact.manifest.lineage[-1].inputs.get("input")
    if packaged != origin.artifact.origin or origin.lineage != artifact.manifest.lineage[:-1]:
        raise ArtifactInvalid(
            f"{mar}: {PROVENANCE} names artifact {origin.artifact.origin}, "
            f"and the manifest's lineage {packaged}"
        )
    proof = proof.with_lines(*_member_lines(members, origin))
    around = evidence()
    proof = prove_chain(proof, origin, around, str(mar))
    return prove_answers(proof, mar, members, origin, around)


def _prove_bare(mar: Path, *, trusted: bool) -> Proof:
    members = read_mar(mar)
    origin = check_members(members, str(mar))
    check_code(members, origin, mar)
    sha256 = sha256_of(mar)
    told = "as you were told" if trusted else "compare it with the one you were given"
    lines = (f"{mar.name}: sha256 {sha256}; {told}", *_member_lines(members, origin))
    proof = Proof(kind=TorchServeArchive.kind, sha256=sha256, proven=lines)
    proof = prove_chain(proof, origin, None, str(mar))
    if origin.artifact.kind == "aot" and not trusted:
        return proof.lacking(NATIVE)
    return prove_answers(proof, mar, members, origin, None)


def check_members(members: Mapping[str, bytes], where: str) -> Provenance:
    """Return the provenance that an archive carries, every other member held against it.

    Raises:
        ArtifactInvalid: a member is missing, altered or added; the message names it.
    """
    if PROVENANCE not in members:
        raise ArtifactInvalid(f"{where}: member {PROVENANCE} is missing")
    origin = Provenance.read(members[PROVENANCE], where)
    recorded = {PROVENANCE, *origin.members}
    for name in sorted(recorded | set(members)):
        if name not in members:
            raise ArtifactInvalid(f"{where}: member {name} is missing")
        if name not in recorded:
            raise ArtifactInvalid(f"{where}: member {name} was added after packing")
        if name != PROVENANCE and digest_of(members[name]) != origin.members[name]:
            raise ArtifactInvalid(f"{where}: member {name} is not the file that was packed")
    for needed in (HANDLER, CONFIG, PROBE, origin.artifact.payload):
        if needed not in members:
            raise ArtifactInvalid(f"{where}: member {needed} is missing")
    if digest_of(members[origin.artifact.payload]).sha256 != origin.artifact.sha256:
        raise ArtifactInvalid(
            f"{where}: member {origin.artifact.payload} is not the payload of the artifact that "
            f"{PROVENANCE} names"
        )
    refuse_broken_chain(origin, where)
    return origin


def check_code(members: Mapping[str, bytes], origin: Provenance, mar: Path) -> None:
    """Raise unless the code in an archive is this version's own, and is what will be run.

    Hashes do not tell: whoever writes a handler can record its hash too. Nor may native code pass
    for another kind, by which it would be started unasked.

    Raises:
        ArtifactInvalid: the handler, or the manifest that names it, is another one, or the payload
            would be loaded as another kind than the archive says it is.
    """
    ours = {
        HANDLER: handler_text(),
        MAR_MANIFEST: mar_manifest(model_name_of(mar), origin.artifact.payload),
    }
    for name, expected in ours.items():
        if members.get(name) != expected:
            raise ArtifactInvalid(
                f"{mar}: member {name} is not the one that this version writes, so nothing in it "
                "is run; verify it with the version that packed it, or package the model again"
            )
    kind = _kind_loaded(members[CONFIG])
    if kind != origin.artifact.kind:
        raise ArtifactInvalid(
            f"{mar}: member {CONFIG} says that {kind!r} is loaded, and {PROVENANCE} that the "
            f"artifact is {origin.artifact.kind!r}, so it is not started"
        )


def _kind_loaded(config: bytes) -> object:
    """Return as what the handler would load the payload; None where that cannot be read."""
    import yaml

    try:
        return yaml.safe_load(config)["handler"]["kind"]
    except (yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError):
        return None


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
