"""Proving an artifact again: every hash, its origin, and for a ``.mar`` that it still answers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from compress.core.artifact import Artifact
from compress.core.errors import ArtifactInvalid
from compress.core.files import sha256_of
from serve.archive import PROBE, PROVENANCE, Provenance, TorchServeArchive
from serve.joined import handler_text
from serve.mar import CONFIG, HANDLER, MAR_MANIFEST, mar_manifest, model_name_of, read_mar
from serve.pack import digest_of
from serve.worker.wire import from_npz

if TYPE_CHECKING:
    from collections.abc import Mapping

ARTIFACT_MODULES = (
    "compress.core.eager",
    "compress.core.graph",
    "export.aot",
    "export.onnx",
    "export.torchscript",
)


def verify(path: Path | str) -> tuple[str, ...]:
    """Return what was proven of an artifact's directory, or of a bare ``.mar``, in plain lines.

    A bare ``.mar`` vouches for itself alone: compare its SHA-256 with the one you were given. An
    archive is started only if its code is the handler that this version ships.

    Raises:
        ArtifactInvalid: a file or member does not match; the message names it.
        Unavailable: Java or TorchServe is missing.
        StageFailed: the served model does not become ready.
    """
    path = Path(path)
    if path.is_file():
        return _prove_bare(path)
    _know_every_kind()
    artifact = Artifact.at(path)
    if isinstance(artifact, TorchServeArchive):
        return _prove_archive(artifact)
    return _prove_files(artifact)


def _prove_files(artifact: Artifact) -> tuple[str, ...]:
    artifact.verify()
    files = artifact.manifest.files
    return (
        f"{artifact.kind} artifact, digest {artifact.digest}",
        *(f"{name}: {f.bytes} bytes, sha256 {f.sha256}, as sealed" for name, f in files.items()),
        *lineage_lines(artifact),
    )


def _prove_archive(artifact: TorchServeArchive) -> tuple[str, ...]:
    mar = artifact.payload_path
    if not mar.is_file():
        raise ArtifactInvalid(f"{artifact.path}: {artifact.payload} is missing")
    members = read_mar(mar)
    origin = check_members(members, str(mar))  # first: it names the member
    lines = _prove_files(artifact)
    check_code(members, origin, mar)
    packaged = artifact.manifest.lineage[-1].inputs.get("input")
    if packaged != origin.artifact.digest or origin.lineage != artifact.manifest.lineage[:-1]:
        raise ArtifactInvalid(
            f"{mar}: {PROVENANCE} names artifact {origin.artifact.digest}, "
            f"and the manifest's lineage {packaged}"
        )
    return (*lines, *_member_lines(members, origin), _replay(mar, members, origin))


def _prove_bare(mar: Path) -> tuple[str, ...]:
    members = read_mar(mar)
    origin = check_members(members, str(mar))
    check_code(members, origin, mar)
    return (
        f"{mar.name}: sha256 {sha256_of(mar)}; compare it with the one you were given",
        *_member_lines(members, origin),
        _replay(mar, members, origin),
    )


def check_members(members: Mapping[str, bytes], where: str) -> Provenance:
    """Return the provenance that an archive carries, every other member held against it.

    Raises:
        ArtifactInvalid: a member is missing, altered or added; the message names it.
    """
    if PROVENANCE not in members:
        raise ArtifactInvalid(f"{where}: member {PROVENANCE} is missing")
    try:
        origin = Provenance.model_validate_json(members[PROVENANCE])
    except ValidationError as error:
        raise ArtifactInvalid(f"{where}: {PROVENANCE}: {error.errors()[0]['msg']}") from error
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
    return origin


def check_code(members: Mapping[str, bytes], origin: Provenance, mar: Path) -> None:
    """Raise unless the code in an archive is this version's own, and is what will be run.

    Hashes do not tell: whoever writes a handler can record its hash too.

    Raises:
        ArtifactInvalid: the handler, or the manifest that names it, is another one.
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


def lineage_lines(artifact: Artifact) -> list[str]:
    """Return one line for each stage that led to an artifact."""
    lines = []
    for step in artifact.manifest.lineage:
        read = ", ".join(f"{role} {digest}" for role, digest in step.inputs.items())
        lines.append(f"{step.stage} read {read or 'nothing'}")
    return lines


def _member_lines(members: Mapping[str, bytes], origin: Provenance) -> list[str]:
    packed = origin.artifact
    return [
        f"{len(members)} members have safe names; {len(origin.members)} hash to what "
        f"{PROVENANCE} records",
        f"{packed.payload} is the payload of {packed.kind} artifact {packed.digest}",
    ]


def _replay(mar: Path, members: Mapping[str, bytes], origin: Provenance) -> str:
    """Start TorchServe, send the recorded inputs and compare the answers.

    Raises:
        ArtifactInvalid: an answer differs from the recorded one.
    """
    import numpy as np
    import yaml

    from serve.client import Client
    from serve.server import TorchServe

    settings = yaml.safe_load(members[CONFIG])["handler"]
    probe = from_npz(members[PROBE])
    inputs = [probe[spec.name] for spec in origin.signature.inputs]
    with (
        TorchServe(mar) as server,
        Client(
            server.url,
            server.model_name,
            origin.signature,
            token=server.token,
            max_rows=int(settings["max_rows"]),
        ) as client,
    ):
        answers = client.predict(inputs)
    worst = 0.0
    for output, got in zip(origin.signature.outputs, answers, strict=True):
        difference = np.abs(got.astype(np.float64) - probe[output.name].astype(np.float64))
        worst = max(worst, float(difference.max(initial=0.0)))
    if not worst <= float(settings["probe_atol"]):
        raise ArtifactInvalid(f"{mar}: {PROBE}: the served answers differ by {worst:.3g}")
    return f"TorchServe answered the recorded probe; largest difference {worst:.3g}"


def _know_every_kind() -> None:
    """Import the artifact types, so that a manifest's kind is recognised."""
    for module in ARTIFACT_MODULES:
        import_module(module)
