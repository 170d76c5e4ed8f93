"""The image of ``compress package --image``, run in a real container by podman."""

import gzip
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from compress.serve.image.container_image import ARCHITECTURES
from compress.serve.torchserve.process import free_ports
from tests.serve.served_here import COMPRESS, TOKEN, as_json, sealed

PODMAN = ["podman", "--runtime", "runc", "--cgroup-manager", "cgroupfs"]
# What a machine without privileges permits, and the host's loopback, on which the test asks.
RUN = "run --rm --read-only --network host --ulimit nofile=1024:1024 --ulimit nproc=1024:1024"
STDLIB = Path(sysconfig.get_path("stdlib"))
LIBRARIES = Path("lib") / f"{platform.machine()}-linux-gnu"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in ("podman", "runc")) or os.getuid() != 0,
        reason="needs root, podman and runc (apt-get install podman runc crun)",
    ),
]


@pytest.fixture
def store() -> Iterator[Path]:
    """A short path, for podman's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="podman-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def podman(store: Path, *arguments: str) -> list[str]:
    """Return a command of podman with a store of images of its own."""
    places = ["--root", str(store / "images"), "--runroot", str(store / "run")]
    return [*PODMAN, *places, "--storage-driver", "vfs", *arguments]


def libraries_of(files: list[Path]) -> set[Path]:
    """Return the shared libraries that programs need, and the loader."""
    done = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, timeout=60)
    return {Path(found) for found in re.findall(r"(/\S+) \(0x", done.stdout)}


def write_base(folder: Path) -> None:
    """Write an OCI layout with this Python, its standard library and what both need of the system.

    A registry has better ones: this needs none.
    """
    program = Path(sys.executable).resolve()
    extensions = [*(STDLIB / "lib-dynload").glob("*.so")]
    # What packages are compiled for (PEP 600, manylinux), of which Python itself needs less.
    compiled_for = ("c", "dl", "m", "pthread", "rt", "util", "resolv", "stdc++", "gcc_s")
    folder_of_system = Path("/usr") / LIBRARIES
    system = {f for name in compiled_for for f in folder_of_system.glob(f"lib{name}.so.[0-9]")}
    system |= libraries_of([program, *extensions])
    system |= libraries_of([*system])
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    skipped = {"site-packages", "test", "__pycache__", "ensurepip", "idlelib", "tkinter"}

    def of_image(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if skipped & {*Path(entry.name).parts} else entry

    plain = folder / "layer.tar"
    with tarfile.open(plain, "w", dereference=True) as archive:
        for name in (program.name, "python3"):
            archive.add(program, f"usr/bin/{name}")
        archive.add(STDLIB, f"usr/lib/{STDLIB.name}", filter=of_image)
        for library in {each.name: each for each in system}.values():
            place = Path("lib64") if library.name.startswith("ld-linux") else LIBRARIES
            archive.add(library, f"{place}/{library.name}")
        for name in ("tmp", "proc", "sys", "dev", "etc", "run", "var/tmp"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            archive.addfile(entry)
    content = plain.read_bytes()
    plain.unlink()

    def add(blob: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(blob).hexdigest()
        (blobs / digest).write_bytes(blob)
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(blob)}

    config = {
        "os": "linux",
        "architecture": ARCHITECTURES[platform.machine()],
        "config": {"Env": ["PATH=/usr/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}"]},
    }
    image = {
        "schemaVersion": 2,
        "config": add(json.dumps(config).encode(), "config.v1+json"),
        "layers": [add(gzip.compress(content, 1), "layer.v1.tar+gzip")],
    }
    manifest = add(json.dumps(image).encode(), "manifest.v1+json")
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [manifest]}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


@contextmanager
def running(store: Path, image: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """Run a container, and remove it."""
    options = [*RUN.split(), "--name", "served", "-e", "COMPRESS_SERVE_TOKEN"]
    command = podman(store, *options, image, "--port", str(port))
    environment = os.environ | {"COMPRESS_SERVE_TOKEN": TOKEN}
    with subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            subprocess.run(podman(store, "rm", "--force", "served"), timeout=60, check=False)


def test_the_image_answers_in_a_container_and_replays_its_probe(
    tmp_path: Path, store: Path
) -> None:
    model, port = sealed(tmp_path / "onnx"), free_ports(1)[0]
    write_base(tmp_path / "base")
    options = ["--image", str(tmp_path / "oci"), "--base", str(tmp_path / "base")]
    done = subprocess.run(
        [*COMPRESS, "package", str(model.path), *options], capture_output=True, text=True
    )
    if "that pip is configured for" in done.stderr:
        pytest.skip("no package index is reachable")
    assert done.returncode == 0, done.stderr
    pulled = subprocess.run(
        podman(store, "pull", "--quiet", f"oci:{tmp_path / 'oci'}"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert pulled.returncode == 0, pulled.stderr
    with running(store, pulled.stdout.strip(), port) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]  # the first one warns
        assert f"served at http://0.0.0.0:{port}/v2/models/model" in lines[1], lines
        url = f"http://127.0.0.1:{port}/v2/models/model/infer"
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, as_json([0, 1, 2, 3]), headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            assert json.load(response)["outputs"][0]["data"] == [0, 2, 4, 6]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, b"{}", timeout=30)
        replay = ["python3", "-m", "compress.serve.image.replay_probe"]
        replay += ["--url", f"http://127.0.0.1:{port}"]
        asked = subprocess.run(
            podman(store, "exec", "served", *replay), capture_output=True, text=True, timeout=60
        )
        assert asked.returncode == 0, asked.stderr
        assert "largest difference from the recorded outputs: 0 of" in asked.stdout
        began = time.monotonic()
        subprocess.run(podman(store, "stop", "served"), timeout=60, check=True)
        assert process.wait(60) == 143
        assert time.monotonic() - began < 10, "it was killed, as it did not end by SIGTERM"
