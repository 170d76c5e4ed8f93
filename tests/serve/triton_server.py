"""A real Triton, from the wheel of NVIDIA's PyTriton, started for a model repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tritonclient.http as triton_http

from tests.serve.test_model_repository import free_port

WHEEL = Path(os.environ.get("TRITON_WHEEL", Path(sys.prefix) / "triton"))
"""Folder that `make .venv/triton` unpacks the wheel into: installed, it would demand numpy 1."""
SERVER = WHEEL / "pytriton" / "tritonserver"
HAS_NONE = "" if SERVER.is_dir() else f"needs a Triton server: make .venv/triton, in {WHEEL}"
DEADLINE = 120


@dataclass
class Triton:
    """A running server."""

    http: str
    grpc: str
    repository: Path
    log: Path

    def calls(self, name: str) -> list[int]:
        """Return how many rows each call of a model has had since the last time."""
        file = self.repository / name / "calls.txt"
        found = [int(line) for line in file.read_text().split()] if file.exists() else []
        file.unlink(missing_ok=True)
        return found


def _backends(folder: Path) -> Path:
    """Write the folder of backends: Triton's for Python, and our three on top of it."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = shutil.copytree(SERVER / "backends" / "python", folder / "python")
    stub = SERVER / "python_backend_stubs" / version / "triton_python_backend_stub"
    Path(shutil.copy(stub, python)).chmod(0o755)
    # The stub's Python is isolated: it reads no PYTHONPATH, and knows no virtual environment.
    packages = sysconfig.get_path("purelib")
    model = f"import sys\nsys.path.insert(0, {packages!r})\nfrom triton_backend import *\n"
    for name in ("onnxruntime", "pytorch", "openvino"):
        (folder / name).mkdir()
        shutil.copy(Path(__file__).with_name("triton_backend.py"), folder / name)
        (folder / name / "model.py").write_text(model)
    return folder


@contextmanager
def triton(repository: Path, folder: Path, *options: str) -> Iterator[Triton]:
    """Serve a repository on free ports of this machine, until all its models are ready."""
    http, grpc = free_port(), free_port()
    command = [
        *(str(SERVER / "bin" / "tritonserver"), f"--model-repository={repository}"),
        *(f"--backend-directory={_backends(folder / 'backends')}", "--allow-metrics=false"),
        *("--http-address=127.0.0.1", f"--http-port={http}"),
        *("--grpc-address=127.0.0.1", f"--grpc-port={grpc}"),
        *("--exit-timeout-secs=5", *options),
    ]
    libraries = f"{WHEEL / 'nvidia_pytriton.libs'}:{sysconfig.get_config_var('LIBDIR')}"
    environment = os.environ | {"LD_LIBRARY_PATH": libraries, "OMP_NUM_THREADS": "1"}
    log = folder / "triton.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + DEADLINE
        with triton_http.InferenceServerClient(f"127.0.0.1:{http}") as client:
            while not _is_ready(client):
                waits = process.poll() is None and time.monotonic() < deadline
                assert waits, log.read_text()[-5000:]
                time.sleep(0.1)
        yield Triton(f"127.0.0.1:{http}", f"127.0.0.1:{grpc}", repository, log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def _is_ready(client: triton_http.InferenceServerClient) -> bool:
    try:
        return bool(client.is_server_ready())
    except OSError:
        return False
