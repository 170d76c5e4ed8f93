"""`compress verify` detects artifacts whose manifest was rewritten after the run."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from compress.artifacts.artifact import Artifact, Step
from compress.common.errors import ArtifactInvalid, PipelineInvalid, Unavailable
from compress.common.sealed_json import read_report, write_report
from compress.pipelines.commands.verify import VerifierInputs, check_file_anchors, verify_command
from compress.serve import attestation
from compress.serve.attestation import MODEL_SIGNATURE, Attestation, read_attestation, statement_of
from compress.serve.http.options import Options
from compress.serve.serve_command import serve_artifacts
from tests import forging
from tests.forging import forge_report

STAGES = ("source", "train", "prune_channels", "export_onnx")


def forge(folder: Path) -> str:
    """Zero the end of an artifact's payload, and write a manifest that vouches for it."""
    name = next(f.name for f in folder.iterdir() if f.name.startswith(("model.", "weights.")))
    forging.forge(folder, name, (folder / name).read_bytes()[:-16] + b"\0" * 16)
    return Artifact.from_directory(folder).digest


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return make_keys(tmp_path / "key.pem")


def make_keys(file: Path, key: Any = None) -> tuple[Path, Path]:
    key = key or ec.generate_private_key(ec.SECP256R1())
    public = file.with_suffix(".public.pem")
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
        serve_artifacts([alone], Options(port=0, sha256=before), None, print)


def test_a_signed_attestation_anchors_what_it_names_and_nothing_else(
    finished_run, tmp_path: Path, keys
) -> None:
    key, public = keys
    file = tmp_path / "train.intoto.json"
    alone = shutil.copytree(finished_run.out / "artifacts" / "export_onnx", tmp_path / "onnx")
    verify_command(finished_run.out / "artifacts" / "export_onnx", attest=file, sign_key=key)
    proof = verify_command(alone, VerifierInputs(attestation=file, key=public))
    assert proof.unproven == ()
    assert "signed by key" in proof.anchors[0] and "slsa.dev/provenance/v1" in proof.anchors[0]
    unchecked = verify_command(alone, VerifierInputs(attestation=file))
    assert "no signature was checked" in unchecked.unproven[0]
    _, other = make_keys(tmp_path / "other.pem")
    with pytest.raises(ArtifactInvalid, match=r"holds no signature of .*other"):
        verify_command(alone, VerifierInputs(attestation=file, key=other))
    forge(alone)
    with pytest.raises(ArtifactInvalid, match="and the attestation says"):
        verify_command(alone, VerifierInputs(attestation=file, key=public))


def replace_other_file(folder: Path) -> None:
    """Replace a file beside the deployed one, as weights beside a graph."""
    forging.forge(folder, "code/nets.py", b"planted = True\n")


def add_file(folder: Path) -> None:
    forging.forge(folder, "planted.txt", b"planted")


def edit_facts(folder: Path) -> None:
    forging.forge_manifest(folder, lambda m: m["facts"].update(class_names=["b", "a"]))


@pytest.mark.parametrize("forgery", [replace_other_file, add_file, edit_facts])
def test_every_file_of_an_artifact_is_the_one_that_was_signed(
    finished_run, tmp_path: Path, keys, forgery: Callable[[Path], None]
) -> None:
    """A signature that names the deployed file alone would let all others be replaced."""
    key, public = keys
    train = finished_run.out / "artifacts" / "train"
    provenance, model = tmp_path / "a.json", tmp_path / "model.sig"
    verify_command(train, attest=provenance, model_signature=model, sign_key=key)
    alone = shutil.copytree(train, tmp_path / "train")
    for file in (provenance, model):
        proof = verify_command(alone, VerifierInputs(attestation=file, key=public))
        assert proof.unproven == () and "names this digest and every file" in proof.proven[-1]
    forgery(alone)
    verify_command(alone)  # it fits its own manifest
    for file in (provenance, model):
        for public_key in (public, None):
            with pytest.raises(ArtifactInvalid, match=r"has sha256|does not name") as e:
                verify_command(alone, VerifierInputs(attestation=file, key=public_key))
            assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("subjects", "message"),
    [
        ({("a", "1")}, "does not name b"),
        ({("a", "1"), ("b", "1")}, "b has sha256 2, and the attestation says 1"),
        ({("a", "1"), ("b", "2"), ("b", "1")}, "b has sha256 2, and the attestation says 1"),
        ({("a", "1"), ("x", "2")}, "does not name b"),
    ],
)
def test_a_file_is_named_with_its_own_digest_and_no_other(subjects, message) -> None:
    found = Attestation(frozenset(subjects), "any")
    with pytest.raises(ArtifactInvalid, match=message):
        found.require_all_of({"a": "1", "b": "2"}, Path("folder"))
    more = Attestation(frozenset({("a", "1"), ("b", "2"), ("other", "3")}), "any")
    more.require_all_of({"a": "1", "b": "2"}, Path("folder"))


def test_a_renamed_file_is_known_by_its_digest_but_not_as_another_one(tmp_path: Path) -> None:
    def statement(**files: str) -> Path:
        subjects = [{"name": f"{n}.mar", "digest": {"sha256": d}} for n, d in files.items()]
        content = {"_type": attestation.STATEMENT, "subject": subjects, "predicateType": "any"}
        (tmp_path / "a.json").write_text(json.dumps(content))
        return tmp_path / "a.json"

    own, other = "1" * 64, "2" * 64
    for named in (statement(model=own, second=other), statement(renamed=own)):
        anchors = check_file_anchors(Path("model.mar"), own, VerifierInputs(attestation=named))
        assert anchors.names == ["a.json (any, unsigned)"]
    for named in (statement(model=other, second=own), statement(model=other)):
        with pytest.raises(ArtifactInvalid, match=r"model\.mar has sha256 1+, and"):
            check_file_anchors(Path("model.mar"), own, VerifierInputs(attestation=named))
    with pytest.raises(ArtifactInvalid, match=r"the attestation does not name model\.mar"):
        check_file_anchors(Path("model.mar"), own, VerifierInputs(attestation=statement(x=other)))


def test_verdicts_of_a_newer_report_are_one_clear_line(project, tmp_path: Path) -> None:
    report, lock = read_report(project.out / "report.json")
    (stage,) = (s for s in report["stages"] if s["name"] == "export_onnx")
    stage["verdicts"][0]["of_a_newer_version"] = 1
    write_report(project.out / "report.json", report, lock)
    with pytest.raises(
        ArtifactInvalid, match=r"report\.json: verdicts of export_onnx are of anoth"
    ):
        verify_command(project.out / "artifacts" / "export_onnx", attest=tmp_path / "made.json")
    assert not (tmp_path / "made.json").exists()


def test_no_attestation_holds_a_local_path(project, tmp_path: Path, keys) -> None:
    """Of the run's folder, of files that are missing, or of settings."""
    key, file, model = keys[0], tmp_path / "a.json", tmp_path / "model.sig"
    train = project.out / "artifacts" / "train"
    verify_command(train, attest=tmp_path / "unsigned.json")
    shutil.rmtree(project.out / "artifacts" / "source")
    given = VerifierInputs(attestation=tmp_path / "unsigned.json")
    verify_command(train, given, attest=file, model_signature=model, sign_key=key)
    texts = [(tmp_path / "unsigned.json").read_text()]
    for written in (json.loads(file.read_text()), json.loads(model.read_text())["dsseEnvelope"]):
        texts.append(base64.b64decode(written["payload"]).decode())
    for text in texts:
        assert str(tmp_path) not in text and "/tmp" not in text and str(Path.home()) not in text
    step = Step(stage="train", settings={"teacher": "/srv/models/net.onnx", "url": "https://a/b"})
    proof = verify_command(train).lacking("validation split: /work/data.yaml is missing")
    text = statement_of({"a": "1"}, [step], proof).decode()
    assert '"teacher":"net.onnx"' in text and '"url":"https://a/b"' in text
    assert "validation split: data.yaml is missing" in text


def test_a_signature_of_the_openssf_tool_is_read(tmp_path: Path) -> None:
    """`model_signing sign key` of version 1.1.1 wrote it, of a folder with two files."""
    theirs = Path(__file__).with_name("openssf")
    file, public = theirs / "model.sig", theirs / "public.pem"
    found = read_attestation(file, public)
    files = {"model.onnx": b"weights", "manifest.json": b"{}"}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert found.subjects == {*digests.items()} and found.predicate_type == MODEL_SIGNATURE
    _, other = make_keys(tmp_path / "other.pem")
    with pytest.raises(ArtifactInvalid, match="holds no signature of"):
        read_attestation(file, other)
    envelope = json.loads(file.read_text())["dsseEnvelope"]
    statement = json.loads(base64.b64decode(envelope["payload"]))
    for field, value, message in (
        ("digest", "0" * 64, "its digest is not that of its files"),
        ("algorithm", "blake3", "expected the SHA-256 of whole files"),
    ):
        changed = json.loads(json.dumps(statement))
        changed["predicate"]["resources"][0][field] = value
        (tmp_path / "a.json").write_text(json.dumps(changed))
        with pytest.raises(ArtifactInvalid, match=message):
            read_attestation(tmp_path / "a.json", None)


@pytest.mark.skipif("MODEL_SIGNING" not in os.environ, reason="MODEL_SIGNING names no such tool")
def test_the_openssf_tool_verifies_what_is_signed_here(finished_run, tmp_path: Path, keys) -> None:
    """With MODEL_SIGNING=venv/bin/model_signing, of `pip install model-signing pyOpenSSL`."""
    key, public = keys
    model, train = tmp_path / "model.sig", finished_run.out / "artifacts" / "train"
    verify_command(train, model_signature=model, sign_key=key)
    alone = shutil.copytree(train, tmp_path / "train")
    command = [os.environ["MODEL_SIGNING"], "verify", "key", alone, "--signature", model]
    for forged in (False, True):
        if forged:
            replace_other_file(alone)
        done = subprocess.run([*command, "--public_key", public], capture_output=True, timeout=60)
        assert (done.returncode != 0) is forged, done.stderr


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
        ({"signatures": None}, "not a DSSE envelope"),
        ({"payload": "?"}, "not a DSSE envelope"),
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
    with pytest.raises(PipelineInvalid, match=r"--sign-key: .* give --attest FILE or"):
        verify_command(train, sign_key=key)
    with pytest.raises(PipelineInvalid, match=r"--key: .* give --attestation FILE too"):
        verify_command(train, VerifierInputs(key=public))
    with pytest.raises(PipelineInvalid, match=r"--model-signature: .* give the folder and --sign"):
        verify_command(train, model_signature=file)
    edwards, _ = make_keys(tmp_path / "ed25519.pem", Ed25519PrivateKey.generate())
    with pytest.raises(PipelineInvalid, match=r"is an ed25519 key, .* reads ECDSA"):
        attest = tmp_path / "attest.json"
        verify_command(train, attest=attest, model_signature=file, sign_key=edwards)
    assert not file.exists() and not attest.exists()
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
def test_the_command_says_what_the_anchor_is_and_ends_with_two(project, commands) -> None:
    folder = project.out / "artifacts" / "export_onnx"
    done = commands.call("verify", folder, cwd=project.folder)
    assert done.returncode == 0 and "anchor: report.json and lock.json of" in done.stdout
    forge(folder)
    done = commands.call("verify", folder, cwd=project.folder)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
