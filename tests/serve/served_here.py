"""A model whose rows say how it behaves, and the built-in server started for it as a user would."""

import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import onnx
from onnx import TensorProto, helper

from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.export.onnx.stage import OnnxModel
from compress.serve.http.asgi_app import Application
from compress.serve.http.model_repository import ModelRepository
from compress.serve.http.shared_state import Served as ServedVersion

ROOT = Path(__file__).parents[2]
COMPRESS = [sys.executable, "-m", "compress.cli"]
TOKEN = "a-token-of-the-tests"
SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", shape=("batch", 4)),),
    outputs=tuple(OutputSpec(name=name) for name in ("double", "zero", "looked")),
)


def sealed(path: Path) -> OnnxModel:
    """Return a model of rows (steps, place, value, value).

    It turns a matrix ``steps`` times, so that a row may be slow; ``looked`` is found at ``place``
    in a table, and a place beyond it fails; a value of 3e38 overflows ``double``, and in the last
    column makes ``zero`` NaN. The table has the places of what packaging asks beside rows of
    values from -1 to 1, a thousand times as large.
    """
    scalar = onnx.numpy_helper.from_array
    constants = {
        "columns": np.array([0, 1, 3]),
        "two": np.array(2.0, np.float32),
        "table": np.arange(1024, dtype=np.float32),
        "matrix": np.eye(256, dtype=np.float32),
        "true": np.array(True),
        "axis": np.array([1]),
    }
    step = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["goes"]),
            helper.make_node("MatMul", ["before", "before"], ["after"]),
        ],
        "step",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("before", TensorProto.FLOAT, [256, 256]),
        ],
        [
            helper.make_tensor_value_info("goes", TensorProto.BOOL, []),
            helper.make_tensor_value_info("after", TensorProto.FLOAT, [256, 256]),
        ],
    )
    node = helper.make_node
    nodes = [
        node("Gather", ["x", "columns"], ["chosen"], axis=1),
        node("Split", ["chosen"], ["steps", "place", "last"], axis=1, num_outputs=3),
        node("ReduceMax", ["steps"], ["most"], keepdims=0),
        node("Cast", ["most"], ["count"], to=TensorProto.INT64),
        node("Loop", ["count", "true", "matrix"], ["turned"], body=step),
        node("ReduceMin", ["turned"], ["nought"], keepdims=0),
        node("Mul", ["x", "two"], ["doubled"]),
        node("Add", ["doubled", "nought"], ["double"]),
        node("Squeeze", ["last", "axis"], ["flat"]),
        node("Mul", ["flat", "two"], ["large"]),
        node("Sub", ["large", "large"], ["zero"]),
        node("Squeeze", ["place", "axis"], ["placed"]),
        node("Cast", ["placed"], ["index"], to=TensorProto.INT64),
        node("Gather", ["table", "index"], ["looked"]),
    ]
    graph = helper.make_graph(
        nodes,
        "rows",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [
            helper.make_tensor_value_info("double", TensorProto.FLOAT, ["batch", 4]),
            helper.make_tensor_value_info("zero", TensorProto.FLOAT, ["batch"]),
            helper.make_tensor_value_info("looked", TensorProto.FLOAT, ["batch"]),
        ],
        [scalar(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.checker.check_model(model)
    with OnnxModel.atomic_write(path, SIGNATURE) as partial:
        onnx.save(model, partial / OnnxModel.payload)
    return OnnxModel.from_directory(path)


def application_of(served: ServedVersion) -> Application:
    """Return the application of one loaded model, inside a running event loop."""
    repository = ModelRepository(load=lambda *_: lambda: served)
    repository.add(served)
    return Application(served.shared, repository)


@dataclass
class Served:
    """A running ``compress serve``."""

    process: subprocess.Popen[str]
    url: str
    curl: str

    def ask(
        self,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        path: str = "/v2/models/model/infer",
        method: str = "POST",
        timeout: float = 30,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send a request, by default JSON with the token; return status, headers and body."""
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
        sent |= headers or {}
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=timeout)
        try:
            connection.request(method, path, body, {k: v for k, v in sent.items() if v})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def rows(self, *rows: list[float], timeout: float = 30) -> tuple[int, dict]:
        """Return the answer to some rows, asked in the protocol's JSON."""
        status, _, body = self.ask(as_json(*rows), timeout=timeout)
        return status, json.loads(body)


def as_json(*rows: list[float]) -> bytes:
    """Return a request in the protocol's JSON."""
    flat = [value for row in rows for value in row]
    tensor = {"name": "x", "shape": [len(rows), 4], "datatype": "FP32", "data": flat}
    return json.dumps({"id": "7", "inputs": [tensor]}).encode()


@contextmanager
def serving(
    artifact: Path,
    *options: str,
    before: Sequence[str] = (),
    command: Sequence[str] = COMPRESS,
    **environment: str,
) -> Iterator[Served]:
    """Start ``compress serve`` and wait until it says where the model is.

    A command such as ``prlimit`` may stand before it, and another in the place of `compress`.
    """
    environment = {**os.environ, "COMPRESS_SERVE_TOKEN": TOKEN, **environment}
    command = [*before, *command, "serve", str(artifact), "--port", "0", *options]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            where, curl = process.stdout.readline(), process.stdout.readline()
            assert "served at" in where, where
            place = urlsplit(where.split("served at ")[1].split()[0])
            url = f"{place.scheme}://{place.netloc}"
            yield Served(process, url, curl)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
