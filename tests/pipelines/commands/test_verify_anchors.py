"""`compress verify` detects artifacts whose manifest was rewritten after the run."""

import base64
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from compress.artifacts.artifact import Artifact
from compress.common.errors import ArtifactInvalid, PipelineInvalid, Unavailable
from pipelines.commands.verify import verify_command
from pipelines.commands.verify_anchors import VerifierInputs
from serve import attestation
from serve.attestation import pae, read_attestation
from serve.http.options import Options
from serve.serve_command import serve_artifact
from tests.forging import forge_report

STAGES = ("source", "train", "prune_channels", "export_onnx")


def forge(folder: Path) -> str:
    """Zero the end of an artifact's payload, and write a manifest that vouches for it."""
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    name = next(name for name in content["files"] if name.startswith(("model.", "weights.")))
    changed = (folder / name).read_bytes()[:-16] + b"\0" * 16
    for file, written in ((folder / name, changed), (manifest, None)):
        file.unlink()  # the store's hard links share the bytes
        if written is None:
            digest = {"sha256": hashlib.sha256(changed).hexdigest(), "bytes": len(changed)}
            content["files"][name] = digest
            written = json.dumps(content, indent=1, sort_keys=True).encode() + b"\n"
        file.write_bytes(written)
    return Artifact.from_directory(folder).digest


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_keys(tmp_path / "key.pem")


def make_keys(file: Path) -> tuple[Path, Path]:
    key, public = Ed25519PrivateKey.generate(), file.with_suffix(".public.pem")
    clear = serialization.NoEncryption()
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, clear)
    )
    public.write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return file, public


def test_the_run_around_an_artifact_is_its_anchor(finished_run) -> None:
    for stage in STAGES:
        proof = verify_command(finished_run.out / "artifacts" / stage)
        named = ("lock.json",) if stage == "source" else ("report.json", "lock.json")
        assert proof.anchors == named
        assert proof.unproven == ()
    assert "3 of the 3 artifacts that it was made of are here, as sealed" in proof.proven


@pytest.mark.parametrize("stage", STAGES)
def test_an_artifact_under_a_new_manifest_is_refused_for_what_the_run_says(project, stage) -> None:
    forge(project.out / "artifacts" / stage)
    with pytest.raises(ArtifactInvalid, match=r"json names .*: it is not the artifact"):
        verify_command(project.out / "artifacts" / stage)


def test_what_was_made_of_it_is_an_anchor_where_the_records_were_changed_too(project) -> None:
    folder = project.out / "artifacts" / "prune_channels"
    before, after = Artifact.from_directory(folder).digest, forge(folder)
    report, lock = (project.out / name for name in ("report.json", "lock.json"))
    written = {file: file.read_text() for file in (report, lock)}
    for file, wrong in ((lock, "lock.json: is not as the run wrote it"),
                        (report, "report.json: is not as it was written")):  # fmt: skip
        file.write_text(written[file].replace(before, after))
        with pytest.raises(ArtifactInvalid, match=wrong):
            verify_command(folder)
        file.write_text(written[file])

    def rename(report, lock) -> None:
        next(s for s in report["stages"] if s["name"] == folder.name)["artifact"]["digest"] = after
        lock["artifacts"][folder.name] = after

    forge_report(project.out, rename)
    with pytest.raises(ArtifactInvalid, match=r"export_onnx/manifest\.json names "):
        verify_command(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [("report.json", None), ("report.json", 0.5), ("lock.json", None), ("lock.json", 0.5)],
)
def test_half_of_a_runs_records_is_no_anchor(project, name, content) -> None:
    file = project.out / name
    raw = file.read_bytes()
    file.unlink()
    if content:
        file.write_bytes(raw[: int(content * len(raw))])
    with pytest.raises(ArtifactInvalid, match=r"json(: is not as| alone)") as error:
        verify_command(project.out / "artifacts" / "train")
    assert "\n" not in str(error.value)


def test_what_it_was_made_of_is_held_against_its_lineage(project) -> None:
    artifacts = project.out / "artifacts"
    forge(artifacts / "train")
    with pytest.raises(ArtifactInvalid, match=r"train: has digest .*export_onnx/manifest"):
        verify_command(artifacts / "export_onnx")
    shutil.rmtree(artifacts / "train")
    proof = verify_command(artifacts / "export_onnx")
    assert "2 of the 3 artifacts that it was made of are here, as sealed" in proof.proven
    assert proof.unproven == ("train: not here",)
    weights = artifacts / "source" / "weights.safetensors"
    changed = weights.read_bytes()[:-1] + b"\1"
    weights.unlink()
    weights.write_bytes(changed)
    with pytest.raises(ArtifactInvalid, match=r"source: weights\.safetensors is not the file"):
        verify_command(artifacts / "export_onnx")


def test_without_an_anchor_it_says_so(finished_run, tmp_path: Path) -> None:
    alone = shutil.copytree(finished_run.out / "artifacts" / "train", tmp_path / "train")
    proof = verify_command(alone)
    assert proof.anchors == ()
    assert (
        "an anchor: this shows only that the folder is consistent with its own" in proof.unproven[0]
    )


@pytest.mark.parametrize("stage", STAGES)
def test_any_artifact_is_anchored_by_a_hash_that_was_given(
    finished_run, tmp_path, stage: str
) -> None:
    alone = shutil.copytree(finished_run.out / "artifacts" / stage, tmp_path / stage)
    artifact = Artifact.from_directory(alone)
    whole = verify_command(alone, VerifierInputs(artifact.digest.upper()))
    assert whole.anchors == ("--sha256",) and whole.unproven == ()
    payload = verify_command(
        alone, VerifierInputs(artifact.manifest.files[artifact.payload_name].sha256)
    )
    assert payload.anchors == ("--sha256",)
    assert f"only {artifact.payload_name} is named; give the digest" in payload.unproven[0]
    before = artifact.digest
    forge(alone)
    verify_command(alone)  # it fits its own manifest
    with pytest.raises(ArtifactInvalid, match="--sha256 names neither its digest"):
        verify_command(alone, VerifierInputs(before))
    with pytest.raises(ArtifactInvalid, match=f"expected {before}, which is not the artifact's"):
        serve_artifact(alone, Options(sha256=before), None, print)


def test_a_signed_attestation_anchors_what_it_names_and_nothing_else(
    finished_run, tmp_path: Path, keys
) -> None:
    key, public = keys
    file = tmp_path / "train.intoto.json"
    alone = shutil.copytree(finished_run.out / "artifacts" / "export_onnx", tmp_path / "onnx")
    verify_command(finished_run.out / "artifacts" / "export_onnx", attest=file, sign_key=key)
    again = tmp_path / "again.json"
    verify_command(finished_run.out / "artifacts" / "export_onnx", attest=again, sign_key=key)
    assert again.read_bytes() == file.read_bytes()
    proof = verify_command(alone, VerifierInputs(attestation=file, key=public))
    assert proof.unproven == ()
    assert "signed by key" in proof.anchors[0] and "slsa.dev/provenance/v1" in proof.anchors[0]
    unchecked = verify_command(alone, VerifierInputs(attestation=file))
    assert "no signature was checked" in unchecked.unproven[0]
    _, other = make_keys(tmp_path / "other.pem")
    with pytest.raises(ArtifactInvalid, match=r"holds no signature of .*other"):
        verify_command(alone, VerifierInputs(attestation=file, key=other))
    forge(alone)
    with pytest.raises(ArtifactInvalid, match="names neither its digest"):
        verify_command(alone, VerifierInputs(attestation=file, key=public))


def test_a_changed_attestation_is_refused(finished_run, tmp_path: Path, keys) -> None:
    key, public = keys
    file = tmp_path / "a.json"
    verify_command(finished_run.out / "artifacts" / "train", attest=file, sign_key=key)
    envelope = json.loads(file.read_text())
    statement = json.loads(base64.b64decode(envelope["payload"]))
    statement["subject"][0]["digest"]["sha256"] = "0" * 64
    forged = base64.b64encode(json.dumps(statement).encode()).decode()
    for changed, words in (
        ({"payload": forged}, "holds no signature of"),
        ({"payloadType": "text/plain"}, "payloadType is 'text/plain'"),
        ({"signatures": []}, "holds no signature of"),
        ({"signatures": None}, "holds no signature of"),
        ({"payload": "?"}, "not base64"),
    ):
        file.write_text(json.dumps(envelope | changed))
        with pytest.raises(ArtifactInvalid, match=words):
            read_attestation(file, public)
    file.write_text(json.dumps(statement))
    with pytest.raises(ArtifactInvalid, match="is not signed, expected a signature of"):
        read_attestation(file, public)
    for content in ("{}", "[]", "1", "", '{"_type": "x"}', '{"payload": 3}', "[" * 5000):
        file.write_text(content)
        with pytest.raises(ArtifactInvalid, match=r"a\.json: "):
            read_attestation(file, None)


def test_keys_that_are_none_are_one_clear_line(
    finished_run, tmp_path: Path, keys, monkeypatch
) -> None:
    key, public = keys
    train, file = finished_run.out / "artifacts" / "train", tmp_path / "a.json"
    for wrong in (public, tmp_path / "absent", finished_run.file):
        with pytest.raises(PipelineInvalid, match=r"not a private key in PEM .*openssl genpkey"):
            verify_command(train, attest=file, sign_key=wrong)
    assert not file.exists()
    with pytest.raises(PipelineInvalid, match=r"--sign-key: .* give --attest FILE too"):
        verify_command(train, sign_key=key)
    with pytest.raises(PipelineInvalid, match=r"--key: .* give --attestation FILE too"):
        verify_command(train, VerifierInputs(key=public))
    monkeypatch.setattr(attestation, "REQUIREMENT", attestation.REQUIREMENT.model_copy(
        update={"what": "no_such_library"}))  # fmt: skip
    with pytest.raises(Unavailable, match=r"pip install -e '\.\[sign\]'"):
        verify_command(train, attest=file, sign_key=key)


def test_the_libraries_of_the_formats_authors_read_it(finished_run, tmp_path: Path, keys) -> None:
    from google.protobuf.json_format import Parse
    from in_toto_attestation.v1.statement import Statement
    from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage
    from securesystemslib.dsse import Envelope
    from securesystemslib.signer import SSlibKey

    key, public = keys
    file = tmp_path / "a.json"
    proof = verify_command(
        finished_run.out / "artifacts" / "export_onnx", attest=file, sign_key=key
    )
    envelope = Envelope.from_dict(json.loads(file.read_text()))
    read = SSlibKey.from_crypto(serialization.load_pem_public_key(public.read_bytes()))
    read.keyid = next(iter(envelope.signatures))
    assert envelope.verify([read], 1)
    assert pae(envelope.payload_type, envelope.payload) == envelope.pae()
    message = Parse(envelope.payload, StatementMessage())
    statement = Statement.copy_from_pb(message)
    statement.validate()
    assert {s.name for s in message.subject} == {"manifest.json", "model.onnx"}
    assert dict(message.subject[0].digest) == {"sha256": proof.digest}
    predicate = json.loads(envelope.payload)["predicate"]
    # The fields of SLSA's provenance.proto v1, and one of ours, whose name begins as SLSA asks.
    assert predicate.keys() == {"buildDefinition", "runDetails", "compress_verification"}
    assert predicate["runDetails"].keys() == {"builder"}
    assert predicate["buildDefinition"].keys() == {
        "buildType",
        "externalParameters",
        "internalParameters",
        "resolvedDependencies",
    }
    materials = predicate["buildDefinition"]["resolvedDependencies"]
    lineage = Artifact.from_directory(
        finished_run.out / "artifacts" / "export_onnx"
    ).manifest.lineage
    assert [m["digest"]["sha256"] for m in materials] == [s.inputs["input"] for s in lineage]


def test_what_is_written_replaces_nothing_that_is_read_and_alters_no_artifact(
    finished_run, tmp_path: Path, keys
) -> None:
    key, folder = keys[0], finished_run.out / "artifacts" / "export_onnx"
    before = key.read_bytes()
    with pytest.raises(PipelineInvalid, match=r"--attest .* another option names that file"):
        verify_command(folder, attest=key, sign_key=key)
    assert key.read_bytes() == before
    both = tmp_path / "proof.json"
    with pytest.raises(PipelineInvalid, match=r"--attest .* another option names that file"):
        verify_command(folder, report=both, attest=both)
    with pytest.raises(PipelineInvalid, match=r"--report .* it lies in an artifact"):
        verify_command(folder, report=folder / "proof.html")
    verify_command(folder)


@pytest.mark.slow
def test_the_command_says_what_the_anchor_is_and_ends_with_two(project) -> None:
    folder = project.out / "artifacts" / "export_onnx"
    command = [sys.executable, "-c", "import cli; cli.main()", "verify", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "anchor: report.json and lock.json of" in done.stdout
    forge(folder)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
