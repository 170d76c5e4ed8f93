"""Other servers of an ONNX model, each in an environment of its own, as their documentation has it.

Each is started as its documentation shows it; other numbers of workers were not tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from benchmarks.server.contenders import HERE, Server, session_variables
from benchmarks.server.load import Request
from compress.serve.torchserve.mar_file import (
    CONFIG,
    HANDLER,
    MAR_MANIFEST,
    mar_manifest,
    write_mar,
)
from compress.serve.torchserve.process import free_ports, kill_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy as np

    Row = dict[str, np.ndarray]
    """One row of each input, by name."""

START_SECONDS = 90
JSON = {"Content-Type": "application/json"}
DATATYPES = {"float32": "FP32", "int64": "INT64"}


def protocol_request(url: str, row: Row, headers: dict[str, str], *, binary: bool) -> Request:
    """Return a request of the Open Inference Protocol, in JSON or with binary tensors."""
    tensors = [
        {"name": name, "shape": [*array.shape], "datatype": DATATYPES[str(array.dtype)]}
        for name, array in row.items()
    ]
    for tensor, array in zip(tensors, row.values(), strict=True):
        if binary:
            tensor["parameters"] = {"binary_data_size": array.nbytes}
        else:
            tensor["data"] = array.ravel().tolist()
    content = {"inputs": tensors}
    if not binary:
        return Request(url, headers | JSON, json.dumps(content).encode())
    head = json.dumps(content | {"parameters": {"binary_data_output": True}}).encode()
    more = {"Content-Type": "application/octet-stream"}
    more["Inference-Header-Content-Length"] = str(len(head))
    return Request(url, headers | more, b"".join([head, *(a.tobytes() for a in row.values())]))


def named_request(url: str, row: Row, headers: dict[str, str] | None = None) -> Request:
    """Return a request with nested lists by name."""
    body = json.dumps({name: array.tolist() for name, array in row.items()})
    return Request(url, (headers or {}) | JSON, body.encode())


@contextmanager
def mlserver(python: Path, model: Path, row: Row, folder: Path) -> Iterator[Server]:
    """Start MLServer without parallel workers, and without adaptive batching."""
    http, grpc, metrics = free_ports(3)
    settings = {"host": "127.0.0.1", "http_port": http, "grpc_port": grpc}
    settings |= {"metrics_port": metrics, "parallel_workers": 0, "debug": False}
    (folder / "settings.json").write_text(json.dumps(settings))
    loaded = {"name": "model", "implementation": "mlserver_model.OnnxModel"}
    (folder / "model-settings.json").write_text(json.dumps(loaded))
    request = protocol_request(
        f"http://127.0.0.1:{http}/v2/models/model/infer", row, {}, binary=False
    )
    command = [python.with_name("mlserver"), "start", folder]
    with started("MLServer", command, folder, {"MODEL": model}, request) as server:
        yield server


@contextmanager
def litserve(python: Path, model: Path, row: Row, folder: Path) -> Iterator[Server]:
    """Start LitServe with a worker for each core, and batches of up to 8."""
    (port,) = free_ports(1)
    variables = {"MODEL": model, "PORT": port, "BATCH": 8, "WORKERS": 2}
    request = named_request(f"http://127.0.0.1:{port}/predict", row)
    command = [python, HERE / "litserve_server.py"]
    with started("LitServe", command, folder, variables, request) as server:
        yield server


@contextmanager
def bentoml(python: Path, model: Path, row: Row, folder: Path) -> Iterator[Server]:
    """Start BentoML with a worker for each core, and adaptive batching."""
    (port,) = free_ports(1)
    variables = {"MODEL": model, "WORKERS": 2, "BENTOML_HOME": folder, "BENTOML_DO_NOT_TRACK": True}
    body = json.dumps({"stacked": [[array[0].tolist() for array in row.values()]]})
    request = Request(f"http://127.0.0.1:{port}/predict", JSON, body.encode())
    command = [python.with_name("bentoml"), "serve", "--host", "127.0.0.1", "--port", port]
    command += ["bentoml_service:OnnxService"]
    with started("BentoML", command, folder, variables, request) as server:
        yield server


@contextmanager
def torchserve(python: Path, model: Path, row: Row, folder: Path) -> Iterator[Server]:
    """Start TorchServe with a custom handler, a worker for each core, and batches of up to 8."""
    ports = free_ports(5)
    members: dict[str, bytes | Path] = {
        MAR_MANIFEST: mar_manifest("model", "model.onnx"),
        HANDLER: (HERE / "torchserve_handler.py").read_bytes(),
        CONFIG: b"minWorkers: 1\nmaxWorkers: 1\nbatchSize: 8\nmaxBatchDelay: 1\n",
        "model.onnx": model,
    }
    write_mar(folder / "model.mar", members)
    names = ("inference_address", "management_address", "metrics_address")
    lines = [f"{n}=http://127.0.0.1:{port}" for n, port in zip(names, ports[:3], strict=True)]
    lines += [f"grpc_inference_port={ports[3]}", f"grpc_management_port={ports[4]}"]
    lines += ["load_models=model.mar", "decode_input_request=false", "number_of_gpu=0"]
    (folder / "config.properties").write_text("\n".join([*lines, ""]))
    request = named_request(f"http://127.0.0.1:{ports[0]}/predictions/model", row)
    command = [python.with_name("torchserve"), "--start", "--foreground", "--ncs"]
    command += ["--disable-token-auth", "--model-store", folder]
    command += ["--ts-config", folder / "config.properties"]
    variables = {"TMPDIR": folder, "LOG_LOCATION": folder, "METRICS_LOCATION": folder}
    with started("TorchServe", command, folder, variables, request) as server:
        yield server


PEER_SERVERS: dict[str, Callable] = {
    "mlserver": mlserver,
    "litserve": litserve,
    "bentoml": bentoml,
    "torchserve": torchserve,
}


@contextmanager
def started(
    name: str, command: list, folder: Path, variables: dict, request: Request
) -> Iterator[Server]:
    """Run a server's command in a process group of its own, until it answers and then is done."""
    environment = session_variables() | {key: str(value) for key, value in variables.items()}
    # Some find their programs, such as Python, on the path.
    environment["PATH"] = os.pathsep.join([str(command[0].parent), environment["PATH"]])
    environment["PYTHONPATH"] = str(HERE)
    with ExitStack() as stack:
        log = stack.enter_context((folder / "output.log").open("wb"))
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(kill_group, process)
        deadline = time.monotonic() + START_SECONDS
        while answer_of(request) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                end = (folder / "output.log").read_text(errors="replace").splitlines()[-3:]
                raise SystemExit(f"{name} does not answer: {' | '.join(end)}")
            time.sleep(0.3)
        yield Server(name, request.url, "", lambda _: request, process.pid)


def answer_of(request: Request) -> bytes | None:
    """Return a server's answer; None while it is not ready."""
    sent = urllib.request.Request(request.url, request.body, request.headers)
    try:
        with urllib.request.urlopen(sent, timeout=10) as response:
            return response.read()
    except (OSError, urllib.error.URLError):
        return None
