"""Any changed byte of an artifact, archive, checkpoint or attestation is refused in a clear line.

Nothing of what was changed is executed: the code in an artifact leaves a trace when it is changed.
"""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from compress.artifacts.artifact import MANIFEST, Artifact
from compress.artifacts.eager_model import EagerModel
from compress.artifacts.graph_model import GraphModel
from compress.artifacts.importing import import_checkpoint
from compress.artifacts.recipe import Recipe
from compress.checkpoint.loading import read_state_dict
from compress.checkpoint.safetensors_io import write_safetensors
from compress.checkpoint.state_dict import in_memory
from compress.cli import describe_artifact
from compress.common.errors import ArtifactInvalid, CompressError, cause_lines
from compress.common.printable import CONTROL_CHARACTERS
from compress.common.sealed_json import load_sealed
from compress.common.signature import Signature, TensorSpec
from compress.serve.attestation import read_attestation, signed, statement_of, subjects_of
from compress.serve.packaging.provenance import digest_of
from compress.serve.torchserve.artifact import check_bare_mar
from compress.serve.torchserve.mar_file import read_mar
from compress.serve.verify import verify
from tests.fuzz.mutations import changed_bytes, changed_value

NETS = "from torch import nn\n\ndef mlp():\n    return nn.Sequential(nn.Linear(4, 3))\n"


def one_line(error: CompressError) -> None:
    (line,) = cause_lines(error)
    assert error.exit_code == 2, line
    assert len(line) < 3000 and not CONTROL_CHARACTERS.search(line) and "internal error" not in line


def refused(act: Callable[[], object]) -> None:
    with pytest.raises(ArtifactInvalid) as caught:
        act()
    one_line(caught.value)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def eager(place: Path) -> EagerModel:
    (place / "fuzzed_nets.py").write_text(NETS)
    signature = Signature(inputs=(TensorSpec(name="x", shape=("batch", 4)),))
    recipe = Recipe(factory="fuzzed_nets:mlp")
    return import_checkpoint(place / "eager", recipe, signature, checkpoint=None, folder=place)


@pytest.fixture(scope="module")
def graph(eager: EagerModel, place: Path) -> GraphModel:
    return GraphModel.from_eager(eager, place / "graph")


@pytest.fixture(scope="module")
def mar(graph: GraphModel, place: Path) -> bytes:
    """Return a `.mar` as the stage packs it; TorchServe is not asked whether it answers."""
    from compress.core.context import Context
    from compress.serve.packaging.model_interface import record_probe
    from compress.serve.torchserve.artifact import PROBE
    from compress.serve.torchserve.mar_file import write_mar
    from compress.serve.torchserve.stage import PackageTorchServe, archive_members

    context, stage = Context(root=place / "packing"), PackageTorchServe()
    members = archive_members(graph, graph, stage, record_probe(graph, context, 4), None)
    assert PROBE in members
    write_mar(place / "model.mar", members)
    return (place / "model.mar").read_bytes()


def rewritten(artifact: Artifact, place: Path, changed: dict[str, bytes]) -> Path:
    """Return a copy of an artifact with other bytes in some files."""
    folder = place / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(artifact.path, folder)
    for name, content in changed.items():
        (folder / name).unlink()
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(data=st.data())
def test_a_changed_file_of_an_artifact_is_refused_before_it_is_read(
    eager: EagerModel, graph: GraphModel, place: Path, data: st.DataObject
) -> None:
    artifact: Any = data.draw(st.sampled_from((eager, graph)))
    name = data.draw(st.sampled_from(sorted(artifact.manifest.files)))
    original = (artifact.path / name).read_bytes()
    changed = data.draw(changed_bytes(original).filter(lambda content: content != original))
    folder = rewritten(artifact, place, {name: changed})
    load = type(artifact).load if artifact is eager else type(artifact).program
    refused(lambda: verify(folder))
    refused(lambda: load(type(artifact).from_directory(folder)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(data=st.data())
def test_a_changed_manifest_is_refused_by_who_knows_the_digest(
    eager: EagerModel, place: Path, data: st.DataObject
) -> None:
    original = (eager.path / MANIFEST).read_bytes()
    structured = changed_value(json.loads(original)).map(lambda v: json.dumps(v).encode())
    changed = data.draw(st.one_of(changed_bytes(original), structured))
    folder = rewritten(eager, place, {MANIFEST: changed})
    try:
        found = Artifact.from_directory(folder)
        assert list(describe_artifact(found))
        found.verify()
    except CompressError as error:
        one_line(error)
    if changed != original:
        refused(lambda: verify(folder, sha256=eager.digest))


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(data=st.data())
def test_weights_and_graphs_under_a_forged_manifest_are_read_or_refused(
    eager: EagerModel, graph: GraphModel, place: Path, data: st.DataObject
) -> None:
    artifact: Any = data.draw(st.sampled_from((eager, graph)))
    name = artifact.payload_name
    changed = data.draw(changed_bytes(artifact.payload_path.read_bytes()))
    manifest = load_sealed((artifact.path / MANIFEST).read_bytes())
    manifest["files"][name] = digest_of(changed).model_dump()
    folder = rewritten(artifact, place, {name: changed, MANIFEST: json.dumps(manifest).encode()})
    opened = type(artifact).from_directory(folder)
    try:
        opened.load() if artifact is eager else opened.program()
    except CompressError as error:
        one_line(error)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(data=st.data())
def test_a_changed_archive_is_refused_or_holds_what_it_held(
    mar: bytes, place: Path, data: st.DataObject
) -> None:
    (place / "original.mar").write_bytes(mar)
    (place / "changed.mar").write_bytes(data.draw(changed_bytes(mar)))
    try:
        members, _ = check_bare_mar(place / "changed.mar")
        assert members == read_mar(place / "original.mar")
    except CompressError as error:
        one_line(error)


STATE = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2), "step": torch.tensor(3)}


def as_sharded_index(folder: Path) -> Path:
    write_safetensors(folder / "part.safetensors", STATE)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(STATE, "part.safetensors")}))
    return index


def as_distributed(folder: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    dcp.save(STATE, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp" / ".metadata"


def _written(name: str, write: Callable[[Path], None], folder: Path) -> Path:
    write(folder / name)
    return folder / name


CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "safetensors": partial(_written, "w.safetensors", lambda file: write_safetensors(file, STATE)),
    "pt": partial(_written, "w.pt", lambda file: torch.save(STATE, file)),
    "old pt": partial(
        _written,
        "old.pt",
        lambda file: torch.save(STATE, file, _use_new_zipfile_serialization=False),
    ),
    "index": as_sharded_index,
    "distributed": as_distributed,
}


@pytest.fixture(scope="module")
def checkpoints(place: Path) -> dict[str, tuple[Path, bytes]]:
    with pytest.warns(UserWarning, match="single process"):
        files = {kind: write(place) for kind, write in CHECKPOINTS.items()}
    return {kind: (file, file.read_bytes()) for kind, file in files.items()}


@pytest.mark.timeout(600)
@given(data=st.data())
def test_a_changed_checkpoint_is_read_or_refused(
    checkpoints: dict[str, tuple[Path, bytes]], data: st.DataObject
) -> None:
    file, original = checkpoints[data.draw(st.sampled_from(sorted(checkpoints)))]
    file.write_bytes(data.draw(changed_bytes(original)))
    try:
        state = read_state_dict(file.parent if file.name == ".metadata" else file)
        for tensor in state.values():
            in_memory(tensor)
    except CompressError as error:
        one_line(error)


@pytest.fixture(scope="module")
def attested(eager: EagerModel, place: Path) -> tuple[bytes, bytes]:
    """Return a statement, and the same signed with a key that lies beside its public one."""
    key = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
    pem, clear = serialization.Encoding.PEM, serialization.NoEncryption()
    (place / "key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, clear))
    spki = serialization.PublicFormat.SubjectPublicKeyInfo
    (place / "public").write_bytes(key.public_key().public_bytes(pem, spki))
    statement = statement_of(subjects_of(eager), (), verify(eager.path))
    return statement, signed(statement, place / "key")


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(data=st.data())
def test_a_changed_attestation_is_refused_or_says_the_same(
    attested: tuple[bytes, bytes], place: Path, data: st.DataObject
) -> None:
    statement, envelope = attested
    file = place / "attestation"
    file.write_bytes(envelope)
    expected = read_attestation(file, place / "public")
    file.write_bytes(data.draw(changed_bytes(envelope)))
    try:
        assert read_attestation(file, place / "public") == expected
    except CompressError as error:
        one_line(error)
    file.write_bytes(data.draw(changed_bytes(statement)))
    try:
        read_attestation(file, None)
    except CompressError as error:
        one_line(error)
