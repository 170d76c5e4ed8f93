"""in-toto Statements of an artifact's files in DSSE envelopes: provenance, model signatures."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.artifacts.artifact import MANIFEST, Artifact, Step
from compress.common.atomic_files import read_regular
from compress.common.config import Settings
from compress.common.errors import ArtifactInvalid, PipelineInvalid, raised_as
from compress.common.requirements import Requirement, pip_install, require_all
from compress.common.sealed_json import canonical_json, load_strictly
from compress.core.verdict import Verdict
from compress.version import __version__

if TYPE_CHECKING:
    from compress.serve.verify import Proof

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
MODEL_SIGNATURE = "https://model_signing/signature/v1.0"
"""Predicates: how a file was made, and which files a model has."""
PAYLOAD_TYPE = "application/vnd.in-toto+json"
BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
MAX_BYTES = 2**24  # largest attestation that is read; ours have some kilobytes
FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/'\":,;()]+/)+")
"""The folders of an absolute path in a text; not the slashes of URLs and of relative paths."""
MAKE_KEY = "`openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out key.pem`"
REQUIREMENT = Requirement(what="securesystemslib", install=pip_install("sign"))


class Certificate(Settings):
    """Verdicts of gates on an artifact."""

    data: str
    """Fingerprint of the data that they were measured on."""
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Attestation:
    """The subjects of an attestation, and its signer if the signature was checked."""

    subjects: frozenset[tuple[str, str]]
    """Name and SHA-256 of each file."""
    predicate_type: str
    signed_by: str = ""
    """Id of the public key whose signature was checked; empty if none was."""
    certificates: tuple[Certificate, ...] = ()

    def require_all_of(self, files: Mapping[str, str], where: Path) -> None:
        """Raise ArtifactInvalid for a file (name → SHA-256) that differs, or is not named."""
        for name, digest in sorted(self.subjects):
            if files.get(name, digest) != digest:
                raise ArtifactInvalid(
                    f"{where}: {name} has sha256 {files[name]}, and the attestation says {digest}"
                )
        unnamed = files.items() - self.subjects
        if unnamed:
            raise ArtifactInvalid(f"{where}: the attestation does not name {min(unnamed)[0]}")


def subjects_of(artifact: Artifact) -> dict[str, str]:
    """Return the SHA-256 of each file of an artifact; the manifest's is the artifact's digest."""
    files = {name: file.sha256 for name, file in artifact.manifest.files.items()}
    return {MANIFEST: artifact.digest, **files}


def statement_of(
    subjects: Mapping[str, str],
    lineage: Sequence[Step],
    proof: Proof,
    run: Mapping[str, Any] | None = None,
    certificates: Sequence[Certificate] = (),
) -> bytes:
    """Return an in-toto Statement of files (name → SHA-256); `run` is `lock.json` of their run."""
    materials = {
        digest: f"{role} of {step.stage}"
        for step in lineage
        for role, digest in step.inputs.items()
    }
    run = run or {}
    checkpoint = (run.get("source") or {}).get("checkpoint")
    materials |= {checkpoint: "checkpoint"} if checkpoint else {}
    known = {key: run[key] for key in ("seed", "data", "versions") if key in run}
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": v}} for name, v in subjects.items()],
        "predicateType": PROVENANCE,
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:compress-pipeline:run:v1",
                "externalParameters": {
                    "stages": [{"stage": s.stage, "settings": s.settings} for s in lineage]
                },
                "internalParameters": known,
                "resolvedDependencies": [
                    {"name": name, "digest": {"sha256": digest}}
                    for digest, name in materials.items()
                ],
            },
            "runDetails": {
                "builder": {
                    "id": "urn:compress-pipeline:compress",
                    "version": {"compress-pipeline": __version__},
                }
            },
            # SLSA requires the vendor's name as a prefix of extension fields.
            "compress_verification": {
                "kind": proof.kind,
                "proven": list(proof.proven),
                "unproven": list(proof.unproven),
                # Through JSON text, where NaN is null.
                "certificates": [json.loads(each.model_dump_json()) for each in certificates],
            },
        },
    }
    return FOLDERS.sub("", canonical_json(statement)).encode()


def sign_model(name: str, files: Mapping[str, str], key_file: Path) -> bytes:
    """Return the signature of a model (its files' SHA-256) that OpenSSF's `model_signing` verifies.

    The private key is of a NIST curve, in PEM, not encrypted; PipelineInvalid for another one.
    """
    key = _load_key(key_file, private=True).public_key
    if key.keytype != "ecdsa":
        raise PipelineInvalid(
            f"{key_file}: is an {key.keytype} key, and `model_signing` reads ECDSA alone; make one "
            f"with {MAKE_KEY}"
        )
    resources = [{"name": n, "algorithm": "sha256", "digest": files[n]} for n in sorted(files)]
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": _root_digest(resources)}}],
        "predicateType": MODEL_SIGNATURE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [],
            },
            "resources": resources,
        },
    }
    pem = key.keyval["public"].encode()
    bundle = {
        "mediaType": BUNDLE_TYPE,
        "verificationMaterial": {
            "publicKey": {"hint": hashlib.sha256(pem).hexdigest()},
            "tlogEntries": [],
        },
        "dsseEnvelope": json.loads(signed(canonical_json(statement).encode(), key_file)),
    }
    return canonical_json(bundle).encode()


def _root_digest(resources: Sequence[Mapping[str, str]]) -> str:
    return hashlib.sha256(b"".join(bytes.fromhex(r["digest"]) for r in resources)).hexdigest()


def signed(statement: bytes, key_file: Path) -> bytes:
    """Sign a statement with a private key (PEM, not encrypted); return the DSSE envelope."""
    signer = _load_key(key_file, private=True)
    from securesystemslib.dsse import Envelope

    envelope = Envelope(statement, PAYLOAD_TYPE, {})
    envelope.sign(signer)
    return canonical_json(envelope.to_dict()).encode()


def read_attestation(file: Path, key_file: Path | None) -> Attestation:
    """Read an unsigned Statement, or one in a DSSE envelope, which may lie in a Sigstore bundle.

    With a public key (PEM), a valid signature of that key is required. ArtifactInvalid if it is no
    attestation, or not signed by the key; PipelineInvalid if the file holds no such key.
    """
    try:
        data = read_regular(file, MAX_BYTES)
    except OSError as error:
        raise ArtifactInvalid(f"{file}: {error.strerror}") from error
    content, signed_by = _parse_json(data, file), ""
    if isinstance(content, dict) and isinstance(content.get("dsseEnvelope"), dict):
        content = content["dsseEnvelope"]
    if isinstance(content, dict) and "payload" in content:
        payload, signed_by = _open_envelope(content, file, key_file)
        content = _parse_json(payload, file)
    elif key_file is not None:
        raise ArtifactInvalid(f"{file}: is not signed, expected a signature of {key_file}")
    with raised_as(ArtifactInvalid, f"{file}: not an in-toto Statement"):
        if content["_type"] != STATEMENT:
            raise ArtifactInvalid(
                f"{file}: _type is {str(content['_type'])[:80]!r}, expected {STATEMENT}"
            )
        kind = str(content["predicateType"])
        named = _files_of_model(content) if kind == MODEL_SIGNATURE else content["subject"]
        files = [(each["name"], each["digest"].get("sha256")) for each in named]
        own = content["predicate"].get("compress_verification", {}) if kind == PROVENANCE else {}
        certificates = [Certificate.model_validate(c) for c in own.get("certificates", ())]
    texts = (each for each in files if {*map(type, each)} == {str})
    return Attestation(frozenset(texts), kind, signed_by, tuple(certificates))


def _files_of_model(statement: Any) -> list[dict[str, Any]]:
    """Return the files that a model signature names; ValueError if its subject's digest differs."""
    resources = statement["predicate"]["resources"]
    if {r["algorithm"] for r in resources} != {"sha256"}:
        raise ValueError("expected the SHA-256 of whole files")
    if [s["digest"]["sha256"] for s in statement["subject"]] != [_root_digest(resources)]:
        raise ValueError("its digest is not that of its files")
    return [{"name": r["name"], "digest": {"sha256": r["digest"]}} for r in resources]


def _open_envelope(content: dict[str, Any], file: Path, key_file: Path | None) -> tuple[bytes, str]:
    """Return an envelope's payload, and the id of the key if it has to be signed by one."""
    require_all([REQUIREMENT], "signatures")
    from securesystemslib.dsse import Envelope
    from securesystemslib.exceptions import VerificationError

    with raised_as(ArtifactInvalid, f"{file}: not a DSSE envelope"):
        # A key's id is a hint, which others derive otherwise, or leave out.
        signatures = [
            {"keyid": str(number), "sig": signature["sig"]}
            for number, signature in enumerate(content["signatures"])
        ]
        envelope = Envelope.from_dict({**content, "signatures": signatures})
    if envelope.payload_type != PAYLOAD_TYPE:
        found = repr(envelope.payload_type)[:80]
        raise ArtifactInvalid(f"{file}: payloadType is {found}, expected {PAYLOAD_TYPE}")
    if key_file is None:
        return envelope.payload, ""
    key = _load_key(key_file, private=False)
    try:
        ids = ("", *envelope.signatures)
        envelope.verify([type(key)(i, key.keytype, key.scheme, key.keyval) for i in ids], 1)
    except VerificationError:
        raise ArtifactInvalid(
            f"{file}: holds no signature of {key_file}, or was altered since"
        ) from None
    return envelope.payload, key.keyid


def _load_key(file: Path, *, private: bool) -> Any:
    """Return a private key as a signer of securesystemslib, or a public one as its key."""
    require_all([REQUIREMENT], "signatures")
    from cryptography.hazmat.primitives import serialization
    from securesystemslib import signer

    library: Any = signer  # whose stubs export none of its classes
    what = f"{file}: not a {'private' if private else 'public'} key in PEM that can be read"
    pair = f"; make a pair with {MAKE_KEY} and `openssl pkey -in key.pem -pubout -out public.pem`"
    with raised_as(PipelineInvalid, what, pair):
        content = file.read_bytes()
        if private:
            return library.CryptoSigner(serialization.load_pem_private_key(content, None))
        return library.SSlibKey.from_crypto(serialization.load_pem_public_key(content))


def _parse_json(content: bytes, file: Path) -> Any:
    with raised_as(ArtifactInvalid, f"{file}: not an attestation in JSON"):
        return load_strictly(content)
