"""Write, sign and read attestations: in-toto Statements with SLSA provenance, in DSSE envelopes.

Formats: in-toto Attestation Framework v1 (Statement, ResourceDescriptor), SLSA Provenance v1, and
DSSE v1, which signs the payload's type and exact bytes, without canonicalization.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compress import __version__
from compress.artifacts.artifact import MANIFEST
from compress.common.atomic_files import open_regular
from compress.common.errors import ArtifactInvalid, PipelineInvalid
from compress.common.requirements import Requirement, pip_install, require_all
from compress.common.strict_json import canonical_json, reject_duplicate_keys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from compress.artifacts.artifact import Artifact, Step
    from serve.torchserve.answer_check import Proof

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
BUILD_TYPE = "urn:compress-pipeline:run:v1"
BUILDER = "urn:compress-pipeline:compress"
MAX_BYTES = 2**24
"""Largest attestation that is read; ours have some kilobytes."""
REQUIREMENT = Requirement(what="cryptography", install=pip_install("sign"))


@dataclass(frozen=True)
class Attestation:
    """The subjects of an attestation, and its signer if the signature was checked."""

    subjects: frozenset[str]
    """SHA-256 of each subject."""
    predicate_type: str
    signed_by: str = ""
    """Fingerprint of the public key whose signature was checked; empty if none was."""


def subjects_of(artifact: Artifact) -> dict[str, str]:
    """Return the SHA-256 of each file of an artifact; the manifest's is the artifact's digest."""
    files = {name: file.sha256 for name, file in artifact.manifest.files.items()}
    return {MANIFEST: artifact.digest, **files}


def statement_of(
    subjects: Mapping[str, str],
    lineage: Sequence[Step],
    proof: Proof,
    run: Mapping[str, Any] | None = None,
) -> bytes:
    """Return an in-toto Statement with SLSA provenance, as canonical JSON.

    Args:
        subjects: the SHA-256 of each attested file, by name.
        lineage: the stages that made them; the artifacts that they read are the materials.
        proof: the result of verifying the artifact.
        run: `lock.json` of the run that made it, if known.
    """
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
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
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
                "builder": {"id": BUILDER, "version": {"compress-pipeline": __version__}}
            },
            # SLSA requires the vendor's name as a prefix of extension fields.
            "compress_verification": {
                "kind": proof.kind,
                "proven": list(proof.proven),
                "unproven": list(proof.unproven),
            },
        },
    }
    return canonical_json(statement).encode()


def signed(statement: bytes, key_file: Path) -> bytes:
    """Sign a statement with a private Ed25519 key (PEM, not encrypted); return the DSSE envelope.

    Raises:
        PipelineInvalid: the file holds no such key.
        Unavailable: the library for signatures is not installed.
    """
    key = _load_key(key_file, private=True)
    signature = {
        "keyid": _fingerprint(key.public_key()),
        "sig": base64.b64encode(key.sign(pae(PAYLOAD_TYPE, statement))).decode(),
    }
    payload = base64.b64encode(statement).decode()
    envelope = {"payload": payload, "payloadType": PAYLOAD_TYPE, "signatures": [signature]}
    return canonical_json(envelope).encode()


def pae(payload_type: str, payload: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding: type and payload, each after its length."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def read_attestation(file: Path, key_file: Path | None) -> Attestation:
    """Read an attestation: a DSSE envelope, or an unsigned Statement.

    With a public Ed25519 key (PEM), a valid signature of that key is required.

    Raises:
        ArtifactInvalid: it is no attestation, or not signed by the key.
        PipelineInvalid: the file holds no such key.
        Unavailable: the library for signatures is not installed.
    """
    try:
        with open_regular(file) as stream:  # a pipe or a device could hold it up, or have no end
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ArtifactInvalid(f"{file}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ArtifactInvalid(f"{file}: has more than {MAX_BYTES} bytes")
    content = _parse_json(data, file)
    signed_by = ""
    if isinstance(content, dict) and "payload" in content:
        payload = _decode_base64(content["payload"], file)
        if content.get("payloadType") != PAYLOAD_TYPE:
            found = repr(content.get("payloadType"))[:80]
            raise ArtifactInvalid(f"{file}: payloadType is {found}, expected {PAYLOAD_TYPE}")
        if key_file is not None:
            signed_by = _check_signature(content.get("signatures"), payload, file, key_file)
        content = _parse_json(payload, file)
    elif key_file is not None:
        raise ArtifactInvalid(f"{file}: is not signed, expected a signature of {key_file}")
    return _parse_statement(content, file, signed_by)


def _parse_statement(statement: Any, file: Path, signed_by: str) -> Attestation:
    try:
        if statement["_type"] != STATEMENT:
            raise ArtifactInvalid(
                f"{file}: _type is {str(statement['_type'])[:80]!r}, expected {STATEMENT}"
            )
        subjects = [subject["digest"].get("sha256") for subject in statement["subject"]]
        digests = frozenset(digest for digest in subjects if isinstance(digest, str))
        return Attestation(digests, str(statement["predicateType"]), signed_by)
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactInvalid(
            f"{file}: not an in-toto Statement ({type(error).__name__}: {error})"
        ) from error


def _check_signature(signatures: Any, payload: bytes, file: Path, key_file: Path) -> str:
    """Require a valid signature of the key; return the key's fingerprint."""
    key = _load_key(key_file, private=False)
    from cryptography.exceptions import InvalidSignature

    message = pae(PAYLOAD_TYPE, payload)
    for signature in signatures if isinstance(signatures, list) else ():
        try:
            key.verify(_decode_base64(signature["sig"], file), message)
        except (InvalidSignature, KeyError, TypeError):
            continue  # of another key: there may be several
        return _fingerprint(key)
    raise ArtifactInvalid(f"{file}: holds no signature of {key_file}, or was altered since")


def _load_key(file: Path, *, private: bool) -> Any:
    require_all([REQUIREMENT], "signatures")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    expected = ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey
    which = "private" if private else "public"
    try:
        content = file.read_bytes()
        if private:
            key: Any = serialization.load_pem_private_key(content, password=None)
        else:
            key = serialization.load_pem_public_key(content)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise PipelineInvalid(
            f"{file}: not a {which} key in PEM that can be read ({error}); make a pair with "
            "`openssl genpkey -algorithm ed25519 -out key.pem` and "
            "`openssl pkey -in key.pem -pubout -out public.pem`"
        ) from None
    if not isinstance(key, expected):
        raise PipelineInvalid(f"{file}: is a {type(key).__name__}, expected a {which} Ed25519 key")
    return key


def _fingerprint(public_key: Any) -> str:
    """Return the SHA-256 of a public key (its SubjectPublicKeyInfo, DER)."""
    from cryptography.hazmat.primitives import serialization

    der = public_key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).hexdigest()


def _parse_json(content: bytes, file: Path) -> Any:
    try:
        return json.loads(content, object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise ArtifactInvalid(f"{file}: not an attestation in JSON ({error})") from None


def _decode_base64(text: Any, file: Path) -> bytes:
    """Decode base64, of the standard or the URL-safe alphabet: DSSE allows both."""
    try:
        return base64.b64decode(text.translate(str.maketrans("-_", "+/")), validate=True)
    except (binascii.Error, AttributeError, ValueError):
        raise ArtifactInvalid(f"{file}: holds text that is not base64") from None
