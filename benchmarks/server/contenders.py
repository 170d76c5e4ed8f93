"""What is compared: the model in the process, behind the built-in server, and behind TorchServe."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from benchmarks.server import load
from benchmarks.server.load import Request
from compress.core.context import Context
from compress.data.splits import Splits
from compress.export.common.int8_sums import has_16_bit_sums
from compress.serve.torchserve.mar_file import HANDLER, read_mar, write_mar
from compress.serve.torchserve.process import TorchServe, free_ports
from compress.serve.torchserve.stage import PackageTorchServe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compress.artifacts.artifact import Artifact
    from compress.common.signature import TensorSpec

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOKEN = "a-token-of-the-benchmark"
WARM_SECONDS = 20
"""Of load, until a request costs Java what it will cost; at first it is four times as much."""


@dataclass(frozen=True)
class Case:
    """So many connections, each sending so many rows at a time."""

    connections: int
    rows: int


class InProcess:
    """onnxruntime called by as many threads as a server has connections."""

    name = "in process"

    def __init__(self, model: Artifact) -> None:
        self.model = model

    def run(self, case: Case, seconds: float) -> dict[str, float]:
        inputs = {
            spec.name: {"dtype": spec.dtype, "shape": shape_of(spec, case.rows)}
            for spec in self.model.signature.inputs
        }
        given = {"model": str(self.model.payload_path), "inputs": inputs}
        given |= {"connections": case.connections, "seconds": seconds}
        # A process of its own: its work must not hold up what it measures.
        done = subprocess.run(
            [sys.executable, str(HERE / "in_process.py")],
            input=json.dumps(given) + "\n",
            capture_output=True,
            text=True,
            env=session_variables(),
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"in_process.py: {done.stderr or done.stdout}")
        found: dict[str, float] = json.loads(done.stdout)
        return found | {"rows_per_second": found["per_second"] * case.rows}


@dataclass(frozen=True)
class Server:
    """A server on loopback."""

    name: str
    url: str
    """Where requests are sent."""
    token: str
    request: Callable[[int], Request]
    """Number of rows → the request."""
    pid: int

    def run(self, case: Case, seconds: float, pause_ms: float | None = None) -> dict[str, float]:
        before = self.cpu_seconds()
        request = self.request(case.rows)
        found = load.run(request, case.connections, max(1, round(seconds)), pause_ms)
        found |= {"server_us": 1e6 * (self.cpu_seconds() - before) / found["requests"]}
        return found | {"rows_per_second": found["per_second"] * case.rows}

    def cpu_seconds(self) -> float:
        """Return what the server and what it started have computed, in seconds of one core."""
        return sum(sum(p.cpu_times()[:2]) for p in self.processes())

    def rss_mib(self) -> float:
        """Return the resident memory of the server and what it started."""
        return sum(p.memory_info().rss for p in self.processes()) / 2**20

    def processes(self) -> list[psutil.Process]:
        """Return the server's process, and those that it started."""
        server = psutil.Process(self.pid)
        return [server, *server.children(recursive=True)]


def raw_request(model: Artifact, url: str, token: str) -> Callable[[int], Request]:
    """Return the requests with a model's only input in plain bytes, zeros."""

    def request(rows: int) -> Request:
        (spec,) = model.signature.inputs
        shape = shape_of(spec, rows)
        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/octet-stream",
            "Accept": "application/octet-stream",
            "X-Shape": ",".join(map(str, shape)),
        }
        body = bytes(math.prod(shape) * np.dtype(spec.dtype).itemsize)
        return Request(url, headers, body)

    return request


@contextmanager
def built_in(model: Artifact, processes: int) -> Iterator[Server]:
    """Give `compress serve` with its defaults, but for the number of processes."""
    with served(model, model.path, "built-in", "--processes", str(processes)) as server:
        yield server


@contextmanager
def built_in_archive(model: Artifact, mar: Path) -> Iterator[Server]:
    """Give `compress serve` for an archive, asked as TorchServe is."""
    with served(model, mar, "built-in, .mar") as server:
        yield server


@contextmanager
def served(model: Artifact, path: Path, name: str, *options: str) -> Iterator[Server]:
    """Give `compress serve` for a path."""
    environment = os.environ | {"COMPRESS_SERVE_TOKEN": TOKEN, "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", "compress.cli", "serve", str(path)]
    command += ["--port", "0", *options]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split("served at ")[1].split()[0]
            infer = url if "/predictions/" in url else f"{url}/infer"
            yield Server(name, infer, TOKEN, raw_request(model, infer, TOKEN), process.pid)
        finally:
            process.terminate()


@contextmanager
def bare(model: Artifact) -> Iterator[Server]:
    """Give the built-in server's library without anything of ours, nor a model."""
    (port,) = free_ports(1)
    with subprocess.Popen([sys.executable, str(HERE / "echo.py"), str(port)]) as process:
        try:
            due = time.monotonic() + 60
            while not reached(port):
                assert time.monotonic() < due
            url = f"http://127.0.0.1:{port}/"
            request = raw_request(model, url, TOKEN)
            yield Server("bare uvicorn", url, TOKEN, request, process.pid)
        finally:
            process.terminate()


def reached(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        time.sleep(0.05)
        return False
    return True


@contextmanager
def torchserve(model: Any, folder: Path) -> Iterator[Server]:
    """Give TorchServe with a worker that joins up to 8 requests, once Java has compiled its code.

    Two workers answer fewer: each joins fewer requests, and they share two cores with the others.
    """
    with packaged(model, folder, workers=1) as server:
        server.run(Case(8, 1), WARM_SECONDS)
        yield server


@contextmanager
def torchserve_echo(model: Any, folder: Path) -> Iterator[Server]:
    """Give the same TorchServe with a handler that answers without a model."""
    with packaged(model, folder, workers=1, handler=HERE / "torchserve_echo.py") as server:
        server.run(Case(8, 1), WARM_SECONDS)
        yield replace(server, name="TorchServe echo")


@contextmanager
def packaged(
    model: Any, folder: Path, workers: int, handler: Path | None = None
) -> Iterator[Server]:
    """Package a model for TorchServe, with batches of up to 8, and serve it there.

    Another handler, if given, takes the place of the archive's.
    """
    stage = PackageTorchServe(workers=workers, batch_size=8, max_batch_delay_ms=1)
    rows = [*zip(*model.signature.example(64), strict=True)]  # to show that they may be joined
    data = Splits({"val": [(row, 0) if len(row) > 1 else row[0] for row in rows]})  # type: ignore[dict-item]
    archive = stage.run(model, Context(root=folder / "archive", data=data))
    mar = archive.payload_path
    if handler is not None:
        members = read_mar(mar)
        mar = folder / "model.mar"
        write_mar(mar, members | {HANDLER: handler.read_bytes()})
    with TorchServe(mar) as server:
        url = f"{server.url}/predictions/{server.model_name}"
        request = raw_request(model, url, server.token)
        yield Server("TorchServe", url, server.token, request, server.pid)


def shape_of(spec: TensorSpec, rows: int) -> list[int]:
    """Return an input's shape with so many rows, and 8 along other dynamic axes."""
    return [rows, *(size if isinstance(size, int) else 8 for size in spec.shape[1:])]


def session_variables() -> dict[str, str]:
    """Return the environment in which all servers open the model with the same options."""
    exact = str(int(has_16_bit_sums()))
    return os.environ | {"OMP_NUM_THREADS": "1", "SESSION_EXACT": exact}


def python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
