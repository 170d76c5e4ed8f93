"""What is compared: the model in the process, behind the built-in server, and behind TorchServe."""

from __future__ import annotations

import base64
import json
import math
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from compress.core.context import Context
from compress.data.splits import Splits
from serve.torchserve.process import TorchServe, free_ports
from serve.torchserve.stage import PackageTorchServe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from compress.artifacts.artifact import Artifact

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
    pid = 0

    def __init__(self, model: Artifact) -> None:
        self.model = model

    def run(self, case: Case, seconds: float) -> dict[str, float]:
        (spec,) = self.model.signature.inputs
        given = {
            "model": str(self.model.payload_path),
            "input": spec.name,
            "dtype": spec.dtype,
            "shape": shape_of(self.model, case.rows),
        }
        return measured("in_process.py", given, case, seconds)


@dataclass(frozen=True)
class Server:
    """A server on loopback, asked in plain bytes."""

    name: str
    model: Artifact
    port: int
    path: str
    token: str
    pid: int

    def run(self, case: Case, seconds: float, rate: float | None = None) -> dict[str, float]:
        (spec,) = self.model.signature.inputs
        shape = shape_of(self.model, case.rows)
        body = bytes(math.prod(shape) * np.dtype(spec.dtype).itemsize)
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            f"Authorization: Bearer {self.token}\r\nContent-Type: application/octet-stream\r\n"
            f"Accept: application/octet-stream\r\nX-Shape: {','.join(map(str, shape))}\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        request = base64.b64encode(head.encode() + body).decode()
        given = {"port": self.port, "request": request, "rate": rate}
        before = self.cpu_seconds()
        found = measured("load.py", given, case, seconds)
        return found | {"server_us": 1e6 * (self.cpu_seconds() - before) / found["requests"]}

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


@contextmanager
def built_in(model: Artifact, processes: int) -> Iterator[Server]:
    """Give `compress serve` with its defaults, but for the number of processes."""
    environment = os.environ | {"COMPRESS_SERVE_TOKEN": TOKEN, "PYTHONPATH": python_path()}
    command = [sys.executable, "-c", "import cli; cli.main()", "serve", str(model.path)]
    command += ["--port", "0", "--processes", str(processes)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split("served at ")[1].split("/v2/")[0]
            port = int(url.rpartition(":")[2])
            yield Server("built-in", model, port, "/v2/models/model/infer", TOKEN, process.pid)
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
            yield Server("bare uvicorn", model, port, "/", TOKEN, process.pid)
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
    stage = PackageTorchServe(workers=1, batch_size=8, max_batch_delay_ms=1)
    rows = [*zip(*model.signature.example(64), strict=True)]  # to show that they may be joined
    data = Splits({"val": [row if len(row) > 1 else row[0] for row in rows]})  # type: ignore[dict-item]
    archive = stage.run(model, Context(root=folder / "archive", data=data))
    with TorchServe(archive.payload_path) as server:
        port = int(server.url.rpartition(":")[2])
        path = f"/predictions/{server.model_name}"
        warmed = Server("TorchServe", model, port, path, server.token, server.pid)
        warmed.run(Case(8, 1), WARM_SECONDS)
        yield warmed


def shape_of(model: Artifact, rows: int) -> list[int]:
    (spec,) = model.signature.inputs
    return [rows, *(size if isinstance(size, int) else 8 for size in spec.shape[1:])]


def measured(script: str, given: dict[str, Any], case: Case, seconds: float) -> dict[str, float]:
    """Return what a process of its own measures: its work must not hold up what it measures."""
    given = given | {"connections": case.connections, "seconds": seconds}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(HERE / script)],
        input=json.dumps(given) + "\n",
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{script}: {done.stderr or done.stdout}")
    found: dict[str, float] = json.loads(done.stdout)
    return found | {"rows_per_second": found["per_second"] * case.rows}


def python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])])
