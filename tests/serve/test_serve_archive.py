"""`compress serve` for archives, at TorchServe's addresses, and for exported files alone."""

import json
import logging
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from compress.common.atomic_files import sha256_of
from compress.common.errors import ArtifactInvalid, StageFailed
from compress.core.context import Context
from compress.export.imported.exported_files import opened_artifact, signature_of_file
from compress.pipelines.bench import bench
from compress.serve.http.options import Options
from compress.serve.packaging.provenance import Provenance, digest_of
from compress.serve.serve_command import open_path, serve_artifacts
from compress.serve.torchserve.artifact import TorchServeArchive
from compress.serve.torchserve.mar_file import read_mar, write_mar
from compress.serve.torchserve.stage import PackageTorchServe
from compress.serve.worker.wire import from_npz, to_npz
from tests.serve.served_here import Served, as_json, sealed, serving

ROW = {"inputs": {"x": [[0, 1, 2, 3]]}}
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> TorchServeArchive:
    folder = tmp_path_factory.mktemp("archive")
    stage = PackageTorchServe(gates=(), model_name="rows", max_rows=2)
    return stage.run(sealed(folder / "onnx"), Context(root=folder / "mar"))


@pytest.fixture(scope="module")
def server(
    archive: TorchServeArchive, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    bare = shutil.copyfile(archive.payload_path, tmp_path_factory.mktemp("bare") / "bare.mar")
    with serving(bare, "--repository-api") as running:
        yield running


def ask(server: Served, method: str, path: str, body: object = None) -> tuple[int, dict]:
    sent = b"" if body is None else json.dumps(body).encode()
    status, _, answer = server.ask(sent, JSON, path, method)
    return status, json.loads(answer)


@pytest.mark.torchserve
@pytest.mark.slow
def test_an_archive_is_managed_as_in_torchserve(server: Served) -> None:
    assert "/predictions/rows" in server.curl
    expected = {"double": [[0, 2, 4, 6]], "zero": [0], "looked": [1]}
    assert ask(server, "POST", "/predictions/rows", ROW) == (200, {"outputs": expected})
    assert (
        server.ask(b"", {"Authorization": ""}, "/ping", "GET")[2]
        == b'{\n  "status": "Healthy"\n}\n'
    )
    assert server.ask(b"", {"Authorization": ""}, "/models", "GET")[0] == 401
    assert ask(server, "GET", "/models")[1]["models"] == [{"modelName": "rows", "modelUrl": "rows"}]
    for path in ("/models/rows", "/models/rows/1.0", "/models/rows/all"):
        (described,) = ask(server, "GET", path)[1]
        assert described["workers"][0]["status"] == "READY"
    for path in ("/models/other", "/models/rows/2.0", "/predictions/rows/2.0"):
        assert ask(server, "GET", path)[1]["type"] == "ModelNotFoundException"
    too_many = {"inputs": {"x": [[0, 1, 2, 3]] * 3}}
    refused = {"code": 413, "message": "3 rows, at most 2 in one request"}
    assert ask(server, "POST", "/predictions/rows", too_many) == (413, refused)
    # The protocol is answered, too.
    assert server.ask(as_json([0, 1, 2, 3]), path="/v2/models/rows/infer")[0] == 200

    assert ask(server, "PUT", "/models/rows?min_worker=3")[0] == 405
    assert ask(server, "DELETE", "/models/rows") == (200, {"status": 'Model "rows" unregistered'})
    assert ask(server, "POST", "/predictions/rows", ROW)[0] == 404
    assert ask(server, "GET", "/models")[1] == {"models": []}
    assert ask(server, "POST", "/models?url=other.mar")[0] == 400
    status = 'Model "rows" Version: 1.0 registered with 1 initial workers'
    assert ask(server, "POST", "/models?url=rows.mar") == (200, {"status": status})
    assert ask(server, "POST", "/predictions/rows", ROW)[0] == 200


@pytest.mark.torchserve
def test_what_is_not_as_packed_is_not_served(archive: TorchServeArchive, tmp_path: Path) -> None:
    def served(path: Path, **options: str) -> None:
        serve_artifacts([path], Options(port=0, **options), None, print)

    members = read_mar(archive.payload_path)
    foreign, changed = tmp_path / "foreign.mar", tmp_path / "changed.mar"
    with zipfile.ZipFile(foreign, "w", zipfile.ZIP_DEFLATED) as other:  # as torch-model-archiver
        for name in ("MAR-INF/MANIFEST.json", "my_handler.py"):
            other.writestr(name, members["MAR-INF/MANIFEST.json"] * 9)
    with pytest.raises(ArtifactInvalid, match=r"handler is code of others.*TorchServe itself"):
        served(foreign)
    write_mar(changed, members | {"model.onnx": members["model.onnx"] + b" "})
    with pytest.raises(ArtifactInvalid, match=r"model\.onnx is not the file that was packed"):
        served(changed)
    with pytest.raises(ArtifactInvalid, match=r"sha256 is \w+, expected 00ff"):
        served(archive.path, sha256="00ff")
    # A probe that the model does not answer.
    record = Provenance.read(members["provenance.json"], "it")
    probe = from_npz(members["probe.npz"])
    other_probe = to_npz({**probe, "double": probe["double"] + 1})
    digests = record.members | {"probe.npz": digest_of(other_probe)}
    sealed_record = record.model_copy(update={"members": digests}).sealed()
    write_mar(changed, members | {"probe.npz": other_probe, "provenance.json": sealed_record})
    with pytest.raises(StageFailed, match="does not answer the probe as packaged"):
        served(changed)


@pytest.mark.torchserve
def test_an_archive_of_another_version_is_served_without_its_handler(
    archive: TorchServeArchive, tmp_path: Path
) -> None:
    members = read_mar(archive.payload_path)
    record = Provenance.read(members["provenance.json"], "it")
    handler = b"raise SystemExit\n" + members["handler.py"]
    digests = record.members | {"handler.py": digest_of(handler)}
    sealed_record = record.model_copy(update={"members": digests}).sealed()
    old = tmp_path / "old.mar"
    write_mar(old, members | {"handler.py": handler, "provenance.json": sealed_record})
    with open_path(old, "rows", Options()) as model:
        (double, *_) = model.call(np.array([[0, 1, 2, 3]], np.float32))
        assert double.tolist() == [[0, 2, 4, 6]]
        assert "its handler is another version's, and is not run" in model.notes[-1]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    return shutil.copyfile(sealed(folder / "onnx").payload_path, folder / "net.onnx")


@pytest.mark.slow
def test_an_exported_file_alone_is_served_by_the_hash_that_was_given(alone: Path) -> None:
    with serving(alone, "--sha256", sha256_of(alone)) as server:
        assert server.rows([0, 1, 2, 3])[1]["outputs"][0]["data"] == [0, 2, 4, 6]
    with pytest.raises(ArtifactInvalid, match=r"sha256 is \w+, expected 00ff"):
        serve_artifacts([alone], Options(port=0, sha256="00ff"), None, print)


@pytest.mark.slow
def test_an_exported_file_alone_is_measured(alone: Path) -> None:
    (model,) = bench(alone, batch=(1,), seconds=0.05).models
    assert (model.name, model.kind) == ("net.onnx", "onnx")


def test_nothing_is_said_to_be_validated_or_joined(
    alone: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR), open_path(alone, "model", Options()) as model:
        assert model.not_joined
    (note,) = [r.getMessage() for r in caplog.records if "is a file alone" in r.getMessage()]
    assert "nothing was validated" in note


@pytest.mark.parametrize(
    ("name", "message"),
    [("net.ts", "compress init"), ("net.bin", "a file that ends in .onnx"), ("no.onnx", "no such")],
)
def test_other_files_are_refused(tmp_path: Path, name: str, message: str) -> None:
    if not name.startswith("no."):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ArtifactInvalid, match=message), opened_artifact(tmp_path / name):
        pass


def test_axes_that_have_no_name_need_not_be_equal(tmp_path: Path) -> None:
    """Paddle's exporter writes -1, and "?" for every axis of which it knows nothing."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [-1, 3, "?", "?"])
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["y"])],
        "g",
        [value],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "net.onnx")
    signature = signature_of_file(tmp_path / "net.onnx")
    assert signature is not None
    assert signature.inputs[0].shape == ("batch", 3, "x_2", "x_3")
