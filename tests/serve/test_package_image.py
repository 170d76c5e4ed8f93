"""``compress package --image``: what it writes, and that the written server answers its probe."""

import gzip
import hashlib
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tarfile
import time
import zipfile
from importlib.metadata import Distribution, version
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.attack import cases_memory as cases
from compress.artifacts.artifact import Artifact, new_folder
from compress.artifacts.eager_model import EagerModel
from compress.cli import app
from compress.common.errors import ArtifactInvalid, PipelineInvalid, StageFailed
from compress.common.foreign import child_process
from compress.common.signature import OutputSpec, Signature
from compress.core.context import Context
from compress.export.openvino.stage import ExportOpenVINO
from compress.serve.http.loaded_model import RUNTIMES
from compress.serve.image import container_image
from compress.serve.image.container_image import (
    ARCHITECTURES,
    SERVING,
    read_base,
    write_build_folder,
    write_image_layout,
)
from compress.serve.image.replay_probe import largest_difference
from compress.serve.torchserve.artifact import TorchServeArchive
from compress.serve.verify import verify
from compress.serve.worker.wire import from_npz, to_npz
from tests.serve.served_here import SIGNATURE, TOKEN, sealed

fork = multiprocessing.get_context("fork")
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package index of empty wheels, under the names and versions that are installed here."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in (*SERVING, *RUNTIMES.values(), "tokenizers", "pillow"):
        distribution = f"{name.replace('-', '_')}-{version(name)}"
        meta = f"{distribution}.dist-info"
        with zipfile.ZipFile(folder / f"{distribution}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name.replace('-', '_')}.py", "")
            wheel.writestr(
                f"{meta}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version(name)}"
            )
            wheel.writestr(f"{meta}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{meta}/RECORD", f"{meta}/RECORD,,\n")
    return folder


@pytest.fixture(autouse=True)
def index(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


@pytest.fixture(scope="module")
def onnx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sealed(tmp_path_factory.mktemp("onnx") / "model").path


@pytest.fixture(scope="module")
def openvino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layer = torch.nn.Linear(4, 2)
    context = Context(root=tmp_path_factory.mktemp("openvino") / "model")
    signature = Signature(inputs=SIGNATURE.inputs, outputs=(OutputSpec(name="double"),))
    source = EagerModel.from_module(layer, signature=signature)
    return ExportOpenVINO().run_checked(source, context).path


def unattested(file: Path) -> None:
    file.write_text("{}")


def instruction(folder: Path, name: str) -> str:
    lines = (folder / "Dockerfile").read_text().splitlines()
    return next(line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} "))


@pytest.mark.parametrize("kind", RUNTIMES)
def test_the_written_server_answers_its_probe_without_torch_or_another_runtime(
    kind: str, request: pytest.FixtureRequest, wheels: Path, tmp_path: Path
) -> None:
    out, model = tmp_path / "image", request.getfixturevalue(kind)
    done = CliRunner().invoke(app, ["package", str(model), "--image", str(out)])
    assert done.exit_code == 0, done.output
    run = done.output.splitlines()[-1]
    assert re.fullmatch(r"docker run .* -e COMPRESS_SERVE_TOKEN=[\w-]{32} model", run)
    digest = Artifact.from_directory(model).digest

    lines = (out / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert {*copied, "Dockerfile", ".dockerignore"} == {file.name for file in out.iterdir()}
    pinned = (out / "requirements.txt").read_text().splitlines()[1:]
    pins = dict(line.split(" --hash=sha256:") for line in pinned)
    hashes = {hashlib.sha256(w.read_bytes()).hexdigest() for w in wheels.iterdir()}
    assert {*pins.values()} < hashes
    absent = {"torch", *RUNTIMES.values()} - {RUNTIMES[kind]}
    assert {pin.partition("==")[0] for pin in pins} == {*SERVING, RUNTIMES[kind]}
    assert f"{RUNTIMES[kind]}=={version(RUNTIMES[kind])}" in pins
    attested = json.loads((out / "attestation.json").read_text())["subject"]
    assert {"name": "manifest.json", "digest": {"sha256": digest}} in attested
    assert verify(out / "model").digest == digest
    assert all(path.stat().st_mode & 0o004 for path in out.rglob("*"))

    (toolkit,) = Distribution.discover(path=[str(out / "app")])
    assert kind in toolkit.entry_points.select(group="compress.artifacts").names

    # Its own command and files, on a free port, and where what is not in it cannot be imported.
    for package in absent:
        (tmp_path / "without" / package).mkdir(parents=True)
        (tmp_path / "without" / package / "__init__.py").write_text("raise ImportError('absent')")
    command = json.loads(instruction(out, "ENTRYPOINT").replace("/opt/compress", str(out)))
    assert command[:4] == ["python3", "-m", "compress.cli", "serve"]
    assert command[command.index("--sha256") + 1] == digest
    options = ["--host", "127.0.0.1", "--port", "0"]
    environment = os.environ | {
        "COMPRESS_SERVE_TOKEN": TOKEN,
        "PYTHONPATH": f"{tmp_path / 'without'}:{out / 'app'}",
    }
    with subprocess.Popen(
        [sys.executable, *command[1:], *options],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split("served at ")[1].split("/v2/")[0]
            assert largest_difference(out, url, TOKEN)[0] == 0
            probe = from_npz((out / "probe.npz").read_bytes())
            probe["double"] = probe["double"] + 1
            (out / "probe.npz").write_bytes(to_npz(probe))
            found, allowed = largest_difference(out, url, TOKEN)
            assert found > allowed
        finally:
            process.kill()


def test_another_kind_is_refused(tmp_path: Path) -> None:
    with TorchServeArchive.atomic_write(tmp_path / "mar", SIGNATURE) as partial:
        (partial / "model.mar").write_bytes(b"")
    with pytest.raises(ArtifactInvalid, match=r"is 'torchserve', expected 'onnx'.*export_onnx"):
        write_build_folder(tmp_path / "mar", tmp_path / "image", unattested)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["mar"]


def test_a_package_without_a_wheel_leaves_nothing(
    onnx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(StageFailed, match="satisfies the requirement httptools=="):
        write_build_folder(onnx, tmp_path / "image", unattested)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("place", ["full", "artifact"])
def test_no_file_is_overwritten(onnx: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    out = tmp_path / "full" if place == "full" else onnx / "image"
    with pytest.raises(PipelineInvalid, match=r"exists; remove it|lies in an artifact"):
        write_build_folder(onnx, out, unattested)


def write_base(folder: Path, program: str = PYTHON, architecture: str = "") -> Path:
    """Write a layout of one image, whose layer holds one program."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def add(content: bytes, kind: str) -> dict:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)}

    with tarfile.open(folder / "layer", "w") as archive:
        archive.addfile(tarfile.TarInfo(f"usr/bin/{program}"))
    content = (folder / "layer").read_bytes()
    (folder / "layer").unlink()
    config = {
        "os": "linux",
        "architecture": architecture or ARCHITECTURES[platform.machine()],
        "config": {"Env": ["PATH=/usr/bin", "PYTHONPATH=/other"], "Cmd": ["python3"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}"]},
    }
    image = {
        "schemaVersion": 2,
        "config": add(json.dumps(config).encode(), "config.v1+json"),
        "layers": [add(content, "layer.v1.tar")],
    }
    manifest = add(json.dumps(image).encode(), "manifest.v1+json")
    # As images for several platforms are: the index names an index.
    index = add(json.dumps({"schemaVersion": 2, "manifests": [manifest]}).encode(), "index.v1+json")
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [index]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


@pytest.mark.slow
def test_a_layer_is_added_to_a_base_with_the_same_bytes_each_time(
    onnx: Path, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base")
    first = write_image_layout(onnx, tmp_path / "first", base, unattested)
    second = write_image_layout(onnx, tmp_path / "second" / "deep", base, unattested)
    assert first.image_digest == second.image_digest

    blobs = tmp_path / "first" / "blobs" / "sha256"
    content = {file.name: file.read_bytes() for file in blobs.iterdir()}
    assert all(hashlib.sha256(raw).hexdigest() == name for name, raw in content.items())
    (descriptor,) = json.loads((tmp_path / "first" / "index.json").read_text())["manifests"]
    assert descriptor["digest"] == first.image_digest
    manifest = json.loads(content[descriptor["digest"][7:]])
    config = json.loads(content[manifest["config"]["digest"][7:]])
    under, added = manifest["layers"]
    assert under["size"] == len(content[under["digest"][7:]])
    plain = gzip.decompress(content[added["digest"][7:]])
    assert config["rootfs"]["diff_ids"][1] == f"sha256:{hashlib.sha256(plain).hexdigest()}"
    assert "Cmd" not in config["config"]
    assert config["config"]["User"].split(":")[0].isdigit()
    environment = dict(entry.split("=") for entry in config["config"]["Env"])
    assert environment["PATH"] == "/usr/bin"
    assert environment["PYTHONPATH"] == "/opt/compress/app:/opt/compress/lib"
    blob = blobs / added["digest"][7:]
    with tarfile.open(blob) as archive:
        members = archive.getmembers()
    assert {member.mtime for member in members} == {0}
    names = [member.name for member in members]
    assert names[:2] == ["opt", "opt/compress"]
    for name in ("model/model.onnx", "app/compress/cli.py", "lib/onnxruntime.py", "probe.npz"):
        assert f"opt/compress/{name}" in names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"program": "python2.7"}, f"has no {PYTHON} in a folder bin"),
        ({"architecture": "s390x"}, "holds 0 OCI images for linux/"),
    ],
)
def test_a_base_that_cannot_run_it_is_refused(
    onnx: Path, tmp_path: Path, arguments: dict, message: str
) -> None:
    base = write_base(tmp_path / "base", **arguments)
    with pytest.raises(ArtifactInvalid, match=message):
        write_image_layout(onnx, tmp_path / "image", base, unattested)


def test_a_base_with_a_changed_blob_is_refused(onnx: Path, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    changed = max((base / "blobs" / "sha256").iterdir(), key=lambda f: f.stat().st_size)
    changed.write_bytes(changed.read_bytes() + b" ")
    with pytest.raises(ArtifactInvalid, match=f"{changed.name}: has sha256"):
        write_image_layout(onnx, tmp_path / "image", base, unattested)
    with pytest.raises(ArtifactInvalid, match="no file of an OCI image layout"):
        write_image_layout(onnx, tmp_path / "image", tmp_path, unattested)
    assert not (tmp_path / "image").exists()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[]", "Input should be an object"),
        ("{}", "manifests: Field required"),
        ('{"manifests": 5}', "manifests: Input should be a valid array"),
        ('{"manifests": [null]}', r"manifests\.0: Input should be an object"),
        ('{"manifests": [{"mediaType": "a", "digest": "sha256:../../x"}]}', "should match pattern"),
        ('{"manifests": ' + "[" * 10**6, "recursion limit"),
        (f'{{"manifests": [{" " * 2**22}]}}', "has more than 4194304 bytes"),
    ],
)
def test_a_malformed_index_is_refused_in_one_line(tmp_path: Path, index: str, message: str) -> None:
    base = write_base(tmp_path / "base")
    (base / "index.json").write_text(index)
    with pytest.raises(ArtifactInvalid, match=rf"index\.json: .*{message}"):
        read_base(base)


@pytest.mark.parametrize(
    "changes",
    [
        {"os": 5},
        {"rootfs": None},
        {"history": 5},
        {"config": {"Env": [5]}},
        {"config": {"Env": ["PATH"]}},
        {"config": {"Labels": []}},
    ],
)
def test_a_malformed_configuration_is_refused(tmp_path: Path, changes: dict) -> None:
    base = cases._image(cases._layout(tmp_path), cases._layer(), **changes)
    with pytest.raises(ArtifactInvalid, match=next(iter(changes))):
        read_base(base)


def test_an_index_that_names_another_twice_is_read_once(tmp_path: Path) -> None:
    with pytest.raises(ArtifactInvalid, match="holds 0 OCI images"):
        read_base(cases.oci_doubling(tmp_path))


# Named, as gzip writes the time, and workers must collect the same tests.
@pytest.mark.parametrize(
    "layer", [b"", b"no archive", cases._layer()[:40]], ids=["empty", "other", "cut off"]
)
def test_a_layer_that_cannot_be_read_is_refused(tmp_path: Path, layer: bytes) -> None:
    base = cases._image(cases._layout(tmp_path), layer)
    with pytest.raises(ArtifactInvalid, match="not a readable layer"):
        read_base(base)


def test_a_layer_that_unpacks_to_much_more_than_it_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(container_image, "MOST_UNPACKED", 2**20)
    base = cases._image(cases._layout(tmp_path), cases._layer(2**26))
    with pytest.raises(ArtifactInvalid, match="unpacks to more than"):
        read_base(base)


def test_a_layer_of_very_many_files_is_not_kept_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(child_process, "SECONDS", 2)
    with pytest.raises(ArtifactInvalid, match="processor time"):
        read_base(cases.oci_layer_of_many(tmp_path, 500_000))


def _write_until_killed(out: Path, started: Connection) -> None:
    with new_folder(out) as partial:
        (partial / "layer").write_text("half")
        started.send("")
        time.sleep(60)


def test_what_a_killed_packaging_left_is_removed_by_the_next(tmp_path: Path) -> None:
    out = tmp_path / "image"
    ours, theirs = fork.Pipe()
    writer = fork.Process(target=_write_until_killed, args=(out, theirs))
    writer.start()
    ours.recv()
    (left,) = tmp_path.glob(f".image.partial-{writer.pid}-*")
    with new_folder(out):
        assert left.exists(), "of a process that is still writing"
    out.rmdir()
    writer.kill()
    writer.join()
    assert left.exists()
    with new_folder(out):
        assert not left.exists()
