"""Several models in one server: names, versions, replacement, canaries, gRPC and traces."""

import asyncio
import http.server
import json
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from onnx import TensorProto, helper
from tritonclient.grpc import service_pb2, service_pb2_grpc

from compress.common.errors import PipelineInvalid
from compress.common.signature import OutputSpec, Signature, TensorSpec
from compress.export.onnx.stage import OnnxModel
from compress.serve.http.asgi_app import Application
from compress.serve.http.dynamic_batcher import Batcher
from compress.serve.http.inference import Inference
from compress.serve.http.loaded_model import ServedModel
from compress.serve.http.messages import HttpError
from compress.serve.http.model_repository import ModelRepository
from compress.serve.http.options import Limits, Options
from compress.serve.http.shared_state import SharedState
from compress.serve.packaging.model_interface import Interface, Tensor
from compress.serve.serve_command import canary_shares, named_paths, serve_artifacts
from tests.serve.served_here import TOKEN, Served, application_of, serving

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", shape=("batch", 4)),), outputs=(OutputSpec(name="y"),)
)
DEADLINE = 60
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
METADATA = {"authorization": f"Bearer {TOKEN}"}
CONFIG = r'{"parameters": {"config": "{\"version_policy\": {\"specific\": {\"versions\": [%s]}}}"}}'
ROW = np.array([[1, 2, 3, 4]], np.float32)


def model(folder: Path, factor: float) -> Path:
    """Seal a model that multiplies by a factor."""
    floats = TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        "factor",
        [helper.make_tensor_value_info("x", floats, ["batch", 4])],
        [helper.make_tensor_value_info("y", floats, ["batch", 4])],
        [onnx.numpy_helper.from_array(np.array(factor, np.float32), "factor")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with OnnxModel.atomic_write(folder, SIGNATURE) as partial:
        onnx.save(made, partial / OnnxModel.payload)
    return folder


def answer(server: Served, name: str, version: str = "") -> tuple[float, str]:
    """Return the factor that a model multiplies by, and the version that says it has answered."""
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    path = f"/v2/models/{name}{f'/versions/{version}' if version else ''}/infer"
    status, _, body = server.ask(json.dumps({"inputs": [tensor]}).encode(), path=path)
    content = json.loads(body)
    assert status == 200, content
    return content["outputs"][0]["data"][0], content["model_version"]


def asked(server: Served, path: str, body: str = "") -> tuple[int, object]:
    status, _, content = server.ask(body.encode(), path=f"/v2/repository/{path}")
    return status, json.loads(content)


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [model(folder / str(factor), factor) for factor in (2, 3, 5)]


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[tuple[Served, str]]:
    port = str(free_port())
    given = (f"A@2={folders[1]}", f"B={folders[2]}", "--repository-api", "--grpc-port", port)
    with serving(f"A={folders[0]}", *given, "--max-mib", "1", "--max-rows", "8") as running:
        yield running, f"127.0.0.1:{port}"


def requests_by_version(server: Served) -> dict[str, float]:
    """Return how many requests of model A were answered, from the server's metrics."""
    _, _, body = server.ask(path="/metrics", method="GET")
    found = r'inference_requests_total\{model="A",status="200",version="(\d)"\} (\S+)'
    return {version: float(count) for version, count in re.findall(found, body.decode())}


def test_names_and_versions_are_answered(server: tuple[Served, str]) -> None:
    http_server, _ = server
    before = requests_by_version(http_server)
    assert answer(http_server, "A") == (3, "2"), "the newest"
    assert answer(http_server, "A", "1") == (2, "1")
    assert answer(http_server, "A", "2") == (3, "2")
    assert answer(http_server, "B") == (5, "1")
    for path in ("/v2/models/C", "/v2/models/A/versions/3", "/v2/models/C/infer"):
        assert http_server.ask(path=path, method="GET")[0] == 404
    _, _, body = http_server.ask(path="/v2/models/A", method="GET")
    assert json.loads(body)["versions"] == ["1", "2"]
    for path, versions in (("A", ["2.0"]), ("A/all", ["1.0", "2.0"]), ("A/1.0", ["1.0"])):
        _, _, body = http_server.ask(path=f"/models/{path}", method="GET")
        assert [each["modelVersion"] for each in json.loads(body)] == versions
    after = requests_by_version(http_server)
    assert {version: after[version] - before.get(version, 0) for version in after} == {
        "1": 1,
        "2": 2,
    }


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritons_clients_manage_models(server: tuple[Served, str], protocol: str) -> None:
    http_server, grpc_address = server
    is_http = protocol == "http"
    triton = triton_http if is_http else triton_grpc
    address = http_server.url.removeprefix("http://") if is_http else grpc_address
    sent = HEADERS if is_http else METADATA

    def states(index: object) -> dict[tuple[str, str], str]:
        rows = (
            index
            if is_http
            else [  # type: ignore[attr-defined]
                {"name": e.name, "version": e.version, "state": e.state} for e in index.models
            ]
        )
        return {(e["name"], e["version"]): e["state"] for e in rows}  # type: ignore[attr-defined]

    with triton.InferenceServerClient(address) as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("A", headers=dict(sent))
        assert client.is_model_ready("A", "1", headers=dict(sent))
        metadata = client.get_model_metadata("B", headers=dict(sent))
        assert (metadata["name"] if is_http else metadata.name) == "B"
        given = triton.InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(ROW)
        for version, factor in (("", 3), ("1", 2)):
            found = client.infer("A", [given], version, request_id="7", headers=dict(sent))
            assert (found.as_numpy("y") == ROW * factor).all()
            response = found.get_response()
            assert (response["id"] if is_http else response.id) == "7"
        client.unload_model("B", headers=dict(sent))
        assert not client.is_model_ready("B", headers=dict(sent))
        index = client.get_model_repository_index(headers=dict(sent))
        assert states(index) == {
            ("A", "1"): "READY",
            ("A", "2"): "READY",
            ("B", "1"): "UNAVAILABLE",
        }
        client.load_model("B", headers=dict(sent))
        assert answer(http_server, "B") == (5, "1")
        config = json.dumps({"version_policy": {"specific": {"versions": [1]}}})
        client.load_model("A", config=config, headers=dict(sent))
        assert answer(http_server, "A") == (2, "1"), "returned to the version before"
        client.load_model("A", headers=dict(sent))
        assert answer(http_server, "A") == (3, "2")
        with pytest.raises(triton.InferenceServerException, match="not in the repository"):
            client.load_model("C", headers=dict(sent))


def test_changes_need_the_token(server: tuple[Served, str]) -> None:
    http_server, _ = server
    for path in ("index", "models/A/load", "models/A/unload"):
        path = f"/v2/repository/{path}"
        assert http_server.ask(path=path, headers={"Authorization": "Bearer wrong"})[0] == 401
    assert http_server.ask(path="/v2/repository/models/A/unload", method="GET")[0] == 405
    assert answer(http_server, "A") == (3, "2")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("models/..%2f..%2fetc/load", "", 404),
        ("models/%2e%2e/load", "", 400),
        ("models//load", "", 400),
        ("models/A", "", 404),
        ("models/A/load", "[" * 50_000, 400),
        ("models/A/load", "[]", 400),
        ("models/A/load", '{"parameters": {"file:1/model.onnx": "AAAA"}}', 400),
        ("models/A/load", '{"parameters": {"config": "{}"}}', 400),
        ("models/A/load", CONFIG % "1e999", 400),
        ("models/A/load", "x" * 65_537, 413),
        ("index", '{"ready": ', 400),
    ],
)
def test_what_is_no_request_of_the_repository_is_refused(
    server: tuple[Served, str], path: str, body: str, status: int
) -> None:
    http_server, _ = server
    assert asked(http_server, path, body)[0] == status
    assert answer(http_server, "A") == (3, "2")


@pytest.mark.parametrize(
    ("array", "datatype", "code"),
    [
        (np.ones((9, 4), np.float32), "FP32", "RESOURCE_EXHAUSTED"),
        (np.ones((1, 3), np.float32), "FP32", "INVALID_ARGUMENT"),
        (np.ones((1, 4), np.int32), "INT32", "INVALID_ARGUMENT"),
        (np.ones((1, 300_000), np.float32), "FP32", "RESOURCE_EXHAUSTED"),
    ],
)
def test_limits_and_checks_hold_over_grpc(
    server: tuple[Served, str], array: np.ndarray, datatype: str, code: str
) -> None:
    given = triton_grpc.InferInput("x", [*array.shape], datatype)
    given.set_data_from_numpy(array)
    with triton_grpc.InferenceServerClient(server[1]) as client:
        with pytest.raises(triton_grpc.InferenceServerException) as raised:
            client.infer("A", [given], headers=METADATA)
        assert raised.value.status() == f"StatusCode.{code}"
        with pytest.raises(triton_grpc.InferenceServerException) as raised:
            client.infer("A", [given], headers={"authorization": "Bearer wrong"})
        assert raised.value.status() == "StatusCode.UNAUTHENTICATED"


def test_numbers_over_grpc_are_not_written_as_json(server: tuple[Served, str]) -> None:
    request = service_pb2.ModelInferRequest(model_name="B")
    given = request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    given.contents.fp32_contents.extend([0.1, 2, 3, 4])
    with grpc.insecure_channel(server[1]) as channel:
        infer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        found = infer(request, metadata=[*METADATA.items()]).raw_output_contents[0]
        assert (np.frombuffer(found, "f") == np.array([0.1, 2, 3, 4], "f") * 5).all()
        given.contents.fp32_contents.extend([0.1] * (240_000 - 4))  # within the MiB as bytes alone
        given.shape[0] = 60_000
        with pytest.raises(grpc.RpcError, match="60000 rows"):
            infer(request, metadata=[*METADATA.items()])


def test_a_stream_of_grpc_is_answered_in_order(server: tuple[Served, str]) -> None:
    answers: list[tuple[object, object]] = []
    given = triton_grpc.InferInput("x", [1, 4], "FP32")
    with triton_grpc.InferenceServerClient(server[1]) as client:
        client.start_stream(lambda result, error: answers.append((result, error)), headers=METADATA)
        for factor in range(3):
            given.set_data_from_numpy(ROW * factor)
            client.async_stream_infer("B", [given])
        client.async_stream_infer("C", [given])
        until(lambda: len(answers) == 4)
    found = [result.as_numpy("y")[0, 0] for result, _ in answers[:3]]  # type: ignore[attr-defined]
    assert found == [0, 5, 10]
    assert "not here" in str(answers[3][1])


def test_silent_connections_to_grpc_leave_files_for_http(folders: list[Path]) -> None:
    port, files = free_port(), ["prlimit", "--nofile=600:600"]
    with (
        serving(folders[0], "--grpc-port", str(port), before=files) as server,
        ExitStack() as silent,
    ):
        for _ in range(700):
            silent.enter_context(socket.create_connection(("127.0.0.1", port), timeout=DEADLINE))
        until(lambda: len([*Path(f"/proc/{server.process.pid}/fd").iterdir()]) > 256)
        for _ in range(20):
            assert answer(server, "model") == (2, "1")
            time.sleep(0.05)


def test_a_stopping_server_takes_no_calls(folders: list[Path]) -> None:
    port = free_port()
    request = service_pb2.ServerLiveRequest()
    with (
        serving(folders[0], "--grpc-port", str(port)) as server,
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        socket.create_connection(("127.0.0.1", urlsplit(server.url).port)) as client,
    ):
        is_live = service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive
        assert is_live(request).live
        head = f"Authorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n"
        client.sendall(f"POST /v2/models/model/infer HTTP/1.1\r\nHost: a\r\n{head}{{".encode())

        def refuses() -> bool:
            with suppress(grpc.RpcError):
                return not is_live(request).live
            return True

        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)
        until(refuses)
        client.sendall(b" " * 99)
        assert client.recv(4096).startswith(b"HTTP/1.1 400"), "that over HTTP was in progress"
        server.process.wait(DEADLINE)


def test_a_server_takes_no_changes_unless_told_to(folders: list[Path]) -> None:
    with serving(folders[0]) as server:
        assert asked(server, "models/model/unload")[0] == 403
        assert asked(server, "index")[0] == 200
        assert answer(server, "model") == (2, "1")


def test_a_watched_folder_is_followed_and_bad_versions_are_not(tmp_path: Path) -> None:
    watched = tmp_path / "watched"
    model(watched / "net" / "1", 2)
    (watched / "loop" / "1").mkdir(parents=True)
    (watched / "loop" / "1" / "manifest.json").symlink_to("manifest.json")
    with serving(f"--watch={watched}", "--canary", "net@9=100%") as server:
        assert answer(server, "net") == (2, "1")
        model(watched / "net" / "2", 3)
        until(lambda: answer(server, "net") == (3, "2"))
        assert answer(server, "net", "1") == (2, "1"), "kept to return to"
        changed = model(tmp_path / "3", 5) / OnnxModel.payload
        changed.write_bytes(changed.read_bytes().replace(b"factor", b"fbctor"))
        (tmp_path / "3").rename(watched / "net" / "3")

        def reason() -> str:
            _, index = asked(server, "index")
            return next((e["reason"] for e in index if e["version"] == "3"), "")  # type: ignore[attr-defined]

        until(lambda: bool(reason()))
        assert OnnxModel.payload in reason()
        assert answer(server, "net") == (3, "2")
        shutil.rmtree(watched / "net" / "2")
        until(lambda: answer(server, "net") == (2, "1"))
        model(watched / "net" / "9", 7)
        until(lambda: answer(server, "net") == (7, "9"))
        assert server.ask(path="/v2/models/..%2f..%2fnet/infer")[0] == 404


def test_loading_outlives_its_client_and_says_what_fails(tmp_path: Path) -> None:
    entered, released = threading.Event(), threading.Event()

    def load(folder: Path, name: str, version: str) -> Callable[[], Inference]:
        entered.set()
        released.wait(DEADLINE)
        raise KeyError(name + version)

    async def changed() -> None:
        shared = SharedState(Limits(), "t")
        repository = ModelRepository(load, {"m": {"1": tmp_path}})
        application = Application(shared, repository, takes_changes=True)
        client = asyncio.create_task(application.change("m", "load", {}))
        await asyncio.to_thread(entered.wait, DEADLINE)
        client.cancel()
        await asyncio.wait([client])
        released.set()
        async with asyncio.timeout(DEADLINE):
            while not repository.index():
                await asyncio.sleep(0.01)
        with pytest.raises(HttpError, match="KeyError: 'm1'") as raised:
            await application.change("m", "load", {})
        assert raised.value.response.status == 400
        application.close()

    asyncio.run(changed())


def test_a_request_in_progress_is_answered_by_the_version_that_took_it() -> None:
    entered, released = threading.Event(), threading.Event()

    def slow(x: np.ndarray) -> list[np.ndarray]:
        entered.set()
        released.wait(DEADLINE)
        return [x]

    async def replaced() -> None:
        shared, closed = SharedState(Limits(), "t"), []

        def version(call: Callable[..., list[np.ndarray]]) -> Inference:
            tensor = Tensor("x", "float32", (-1, 4))
            interface = Interface((tensor,), (tensor,), rows_stay_first=True)
            served = ServedModel("m", "onnx", SIGNATURE, interface, call, "")
            return Inference(served, Batcher(call), Limits(), shared)

        before, after = version(slow), version(lambda x: [x * 2])
        before.resources.callback(closed.append, before)
        application = application_of(before)

        async def ask() -> float:
            tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
            body, sent = json.dumps({"inputs": [tensor]}).encode(), []

            async def receive() -> dict[str, object]:
                return {"type": "http.request", "body": body}

            async def send(message: object) -> None:
                sent.append(message)

            headers = [(b"authorization", b"Bearer t"), (b"content-length", b"%d" % len(body))]
            scope = {"path": "/v2/models/m/infer", "method": "POST", "headers": headers}
            await application(scope, receive, send)  # type: ignore[arg-type]
            return float(json.loads(sent[1]["body"])["outputs"][0]["data"][0])

        first = asyncio.create_task(ask())
        await asyncio.to_thread(entered.wait, DEADLINE)
        waiting = asyncio.create_task(ask())
        async with asyncio.timeout(DEADLINE):
            while before.workers.depth < 2:
                await asyncio.sleep(0.01)
        application.repository.add(after)
        assert await ask() == 2
        await asyncio.sleep(0.2)
        assert not closed, "its last request has not ended"
        released.set()
        assert (await first, await waiting) == (1, 1)
        async with asyncio.timeout(DEADLINE):
            while not closed:
                await asyncio.sleep(0.01)
        application.close()

    asyncio.run(replaced())


def test_processes_follow_a_signal(tmp_path: Path) -> None:
    folder = model(tmp_path / "net", 2)
    with serving(f"A={folder}", "--processes", "2") as server:
        assert answer(server, "A") == (2, "1")
        model(tmp_path / "new", 3)
        folder.rename(tmp_path / "old")
        (tmp_path / "new").rename(folder)
        assert answer(server, "A") == (2, "1")
        os.kill(server.process.pid, signal.SIGHUP)
        until(lambda: all(answer(server, "A") == (3, "1") for _ in range(20)))


def test_a_canary_gets_its_share(folders: list[Path]) -> None:
    with serving(f"A={folders[0]}", f"A@2={folders[1]}", "--canary", "A@2=25%") as server:
        factors = [answer(server, "A")[0] for _ in range(200)]
    assert 20 < factors.count(3) < 90, "50 expected; outside once in ten million runs"
    assert factors.count(2) == 200 - factors.count(3)


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ([], {}, "nothing to serve"),
        (["A=x", "A@1=y"], {}, "version 1 of A is x"),
        (["x", "y"], {}, "version 1 of model is x"),
        (["A=x", "B=y"], {"sha256": "00"}, "serve it alone"),
        (["x"], {"processes": 2, "repository_api": True}, "one of the --processes"),
        (["A=x"], {"canaries": {"A": ("2", 0.1)}}, "beside another; found A@1"),
        ([], {"watch": Path("/nowhere")}, "no such directory"),
    ],
)
def test_what_is_unclear_is_refused(given: list[str], options: dict, words: str) -> None:
    with pytest.raises(PipelineInvalid, match=re.escape(words)):
        serve_artifacts(given, Options(**options), None, print)


@pytest.mark.parametrize("given", ["A=5%", "A@2=5", "A@2=101%", "A@0=5%", "@2=5%"])
def test_a_canary_needs_name_version_and_percent(given: str) -> None:
    with pytest.raises(PipelineInvalid, match=re.escape(f"--canary {given}: expected")):
        canary_shares([given])


def test_a_path_with_an_equals_sign_is_a_path() -> None:
    assert named_paths(["runs/a=b/net"]) == {("model", "1"): Path("runs/a=b/net")}
    assert named_paths(["net@3=runs/a=b"]) == {("net", "3"): Path("runs/a=b")}


def test_traces_continue_the_clients(folders: list[Path]) -> None:
    pytest.importorskip("opentelemetry.sdk")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            sent = ExportTraceServiceRequest.FromString(body)
            spans.extend(s for r in sent.resource_spans for c in r.scope_spans for s in c.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with serving(f"A={folders[0]}", "--traces", url, OTEL_BSP_SCHEDULE_DELAY="100") as server:
            tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
            headers = {"traceparent": f"00-{trace}-{parent}-01"}
            body = json.dumps({"inputs": [tensor]}).encode()
            server.ask(body, headers, path="/v2/models/A/infer")
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(DEADLINE)
        collector.shutdown()
    (span,) = spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, parent)
    assert span.name == "infer A"


def test_without_an_extra_the_error_says_what_to_install(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from compress.common.errors import Unavailable

    for name, options in (("grpc", Options(grpc_port=1)), ("opentelemetry", Options(traces="x"))):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(Unavailable, match="install"):
            serve_artifacts([folders[0]], options, None, print)
