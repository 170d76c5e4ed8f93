"""The built-in server as a user starts it: its answers, its refusals, and that it stays up."""

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from compress.common.errors import StageFailed
from compress.profiling.batch_dependence import BatchDependence
from compress.serve.client.client import Client, DeadlineConnection, Npz, OpenInference
from compress.serve.worker.wire import NPY, NPZ, RAW, from_npz
from tests.serve.attacks import tensors
from tests.serve.mistakes import GOOD, MISTAKES, NOT_THERE, ROW, changed
from tests.serve.served_here import SIGNATURE, TOKEN, Served, as_json, sealed, serving


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model in a run's folder, whose report lets requests join."""
    folder = tmp_path_factory.mktemp("builtin")
    model = sealed(folder / "artifacts" / "model")
    shown = BatchDependence(rows=8, source="val").model_dump(mode="json")
    row = {"artifact": {"digest": model.digest}, "measurements": {"batch_dependence": shown}}
    (folder / "report.json").write_text(json.dumps({"stages": [row]}))
    return model.path


@pytest.fixture(scope="module")
def server(artifact: Path) -> Iterator[Served]:
    limits = ("--max-rows", "16", "--max-mib", "1", "--queue", "8")
    with serving(artifact, *limits) as running:
        yield running


@pytest.fixture(autouse=True)
def _stays_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """After whatever a test did, the server still answers rightly."""
    yield
    if "server" in request.fixturenames:
        status, answer = request.getfixturevalue("server").rows(GOOD)
        assert (status, answer["outputs"][0]["data"]) == (200, [0.0, 6.0, 3.0, -4.0])


def test_the_printed_curl_line_works(server: Served) -> None:
    assert TOKEN not in server.curl, "a token that was given is not shown"
    environment = os.environ | {"COMPRESS_SERVE_TOKEN": TOKEN}
    done = subprocess.run(
        server.curl, shell=True, capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"][0]["data"] == [0.0] * 4


def test_health_needs_no_token_and_the_rest_does(server: Served) -> None:
    for path in ("/v2/health/live", "/v2/health/ready"):
        status, _, body = server.ask(headers={"Authorization": ""}, path=path, method="GET")
        assert (status, list(json.loads(body).values())) == (200, [True])
    for path in ("/v2", "/v2/models/model", "/v2/models/model/ready", "/metrics"):
        assert server.ask(path=path, method="GET")[0] == 200
        for wrong in ("", "Bearer", "Bearer wrong", f"Basic {TOKEN}", "Bearer \u00e9"):
            headers = {"Authorization": wrong}
            status, answered, body = server.ask(headers=headers, path=path, method="GET")
            assert status == 401
            assert answered["WWW-Authenticate"] == "Bearer"
            assert "expected the header Authorization: Bearer" in json.loads(body)["error"]


def test_the_metadata_has_names_types_and_shapes(server: Served) -> None:
    _, _, body = server.ask(path="/v2/models/model", method="GET")
    metadata = json.loads(body)
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert [(t["name"], t["shape"]) for t in metadata["outputs"]] == [
        ("double", [-1, 4]),
        ("zero", [-1]),
        ("looked", [-1]),
    ]
    _, _, body = server.ask(path="/v2", method="GET")
    assert json.loads(body)["extensions"] == ["binary_tensor_data"]


@pytest.mark.parametrize(
    "form",
    [Npz("/v2/models/", "/infer"), OpenInference(), OpenInference(binary=False)],
    ids=["npz", "binary", "json"],
)
def test_every_wire_format_answers_like_onnxruntime_in_process(
    server: Served, artifact: Path, form: Npz | OpenInference
) -> None:
    rows = np.random.default_rng(1).uniform(-1, 1, (40, 4)).astype(np.float32)
    session = onnxruntime.InferenceSession(str(artifact / "model.onnx"))
    expected = session.run(None, {"x": rows})
    with Client(server.url, "model", SIGNATURE, token=TOKEN, max_rows=16, form=form) as client:
        got = client.predict([rows])  # 40 rows go in three requests
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)


def test_plain_bytes_and_npy(server: Served) -> None:
    row = np.array([GOOD], np.float32)
    stream = io.BytesIO()
    np.save(stream, row)
    for content_type, body in ((RAW, row.tobytes()), (NPY, stream.getvalue())):
        headers = {"Content-Type": content_type, "Accept": NPZ}
        status, _, answer = server.ask(body, headers)
        assert status == 200
        assert from_npz(answer)["looked"] == 3.0


def test_only_the_outputs_asked_for_are_answered(server: Served) -> None:
    request = json.loads(as_json(GOOD, GOOD))
    binary = {"name": "looked", "parameters": {"binary_data": True}}
    request["outputs"] = [{"name": "zero"}, binary]
    status, headers, body = server.ask(json.dumps(request).encode())
    length = int(headers["Inference-Header-Content-Length"])
    answer = json.loads(body[:length])
    assert (status, answer["id"]) == (200, "7")
    assert [output["name"] for output in answer["outputs"]] == ["zero", "looked"]
    assert answer["outputs"][0]["data"] == [0.0, 0.0]
    assert np.frombuffer(body[length:], "<f4").tolist() == [3.0, 3.0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_clients_mistake_is_named(server: Served, mistake: str) -> None:
    body, headers, expected, words = MISTAKES[mistake]
    status, _, answer = server.ask(body, headers)
    message = json.loads(answer)["error"]
    assert (status, [word for word in words if word not in message]) == (expected, []), message
    assert len(message) < 400


@pytest.mark.parametrize("content_type", ["", "application/x-www-form-urlencoded"])
def test_a_body_without_a_type_is_json(server: Served, content_type: str) -> None:
    """NVIDIA's client sends none, curl's -d that of a form."""
    for body, expected in ((as_json(GOOD), 200), (b"abc", 400)):
        status, _, answer = server.ask(body, {"Content-Type": content_type})
        assert status == expected
    assert "not JSON" in json.loads(answer)["error"]


@pytest.mark.parametrize(
    "body",
    [tensors(10_000), changed(data=[0] * 300_000), b"[%s0]" % (b"[]," * 300_000)],
    ids=["tensors", "numbers", "lists"],
)
def test_json_of_more_values_than_the_inputs_have_is_not_parsed(
    server: Served, body: bytes
) -> None:
    headers = {"Inference-Header-Content-Length": str(len(body))}
    for more in ({}, headers):
        status, _, answer = server.ask(body, more)
        message = json.loads(answer)["error"]
        assert (status, message) == (
            413,
            "the body holds more values than 16 rows of the inputs have",
        )


def test_a_body_over_the_limit_is_refused(server: Served) -> None:
    status, _, answer = server.ask(bytes(2**20 + 1))
    assert status == 413
    assert "1048577 bytes, expected at most 1048576" in json.loads(answer)["error"]


def test_a_body_of_unknown_length_is_bounded_too(server: Served) -> None:
    connection_headers = {"Transfer-Encoding": "chunked", "Content-Length": ""}
    chunk = b"10000\r\n" + bytes(65536) + b"\r\n"
    body = chunk * 17 + b"0\r\n\r\n"
    status, _, answer = server.ask(body, connection_headers)
    assert (status, "more than 1048576" in json.loads(answer)["error"]) == (413, True)


def test_other_paths_and_methods(server: Served) -> None:
    assert server.ask(path="/v2/models/other/infer")[0] == 404
    assert server.ask(path="/")[0] == 404
    status, headers, _ = server.ask(method="GET")
    assert (status, headers["Allow"]) == (405, "POST")
    assert server.ask(path="/metrics", method="POST")[0] == 405
    status, _, body = server.ask(path="/v2", method="HEAD")
    assert (status, body) == (200, b"")


def test_an_infinite_answer_is_given_in_bytes_and_nan_never(server: Served) -> None:
    headers = {"Content-Type": RAW, "Accept": NPZ}
    status, _, body = server.ask(np.array([[0, 3, 3e38, 0]], np.float32).tobytes(), headers)
    assert (status, from_npz(body)["double"][0, 2]) == (200, np.inf)
    status, _, body = server.ask(np.array([[0, 3, 0, 3e38]], np.float32).tobytes(), headers)
    assert (status, "answers NaN in zero" in json.loads(body)["error"]) == (422, True)


def counted(server: Served) -> dict[str, float]:
    _, _, body = server.ask(path="/metrics", method="GET")
    lines = [line.rsplit(" ", 1) for line in body.decode().splitlines() if line[:1] != "#"]
    return {name: float(value) for name, value in lines}


def test_good_and_bad_rows_are_joined_and_each_gets_its_own_answer(server: Served) -> None:
    rows = [NOT_THERE if i % 3 == 0 else [0.0, float(i), i / 2, -1.0] for i in range(6)]
    before = counted(server)
    with ThreadPoolExecutor(7) as pool:
        slow = pool.submit(server.rows, [150.0, 0.0, 0.0, 0.0])  # the others queue up behind it
        while counted(server)['inference_queue_length{model="model",version="1"}'] < 1:
            assert not slow.done()
        answers = [*pool.map(server.rows, rows)]
    for row, (status, answer) in zip(rows, answers, strict=True):
        if row is NOT_THERE:
            assert status == 422
            assert "out of data bounds" in answer["error"]
        else:
            assert status == 200
            assert answer["outputs"][0]["data"] == [2 * value for value in row]
            assert answer["outputs"][2]["data"] == [row[1]]
    after = counted(server)
    name = 'inference_requests_total{model="model",status="%d",version="1"}'
    assert after[name % 200] - before.get(name % 200, 0) == 5
    assert after[name % 422] - before.get(name % 422, 0) == 2
    rows_name = 'inference_rows_total{model="model",version="1"}'
    assert after[rows_name] - before[rows_name] == 5


def test_a_full_queue_gives_503_with_retry_after(server: Served) -> None:
    with ThreadPoolExecutor(24) as pool:
        # Rows beyond a call's limit together, so that the model is called again and again.
        slow = [[80.0, 0.0, 0.0, 0.0], *[[0.0] * 4] * 15]
        futures = [pool.submit(server.ask, as_json(*slow)) for _ in range(24)]
        answers = [future.result() for future in futures]
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 503}
    assert statuses.count(200) >= 8
    for status, headers, body in answers:
        if status == 503:
            assert headers["Retry-After"] == "1"
            assert "8 requests wait" in json.loads(body)["error"]


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        b"GET / HTTP/1.1\r\nX: ",
        b"POST /v2/health/live HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
    ],
)
def test_an_endless_head_is_refused(server: Served, start: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as endless:
        endless.sendall(start)
        with pytest.raises(ConnectionError):
            for _ in range(100):
                endless.sendall(b"x" * 100_000)
    assert server.rows(GOOD)[0] == 200


def test_a_slow_client_does_not_delay_others(server: Served) -> None:
    place = server.url.removeprefix("http://").rsplit(":", 1)
    with socket.create_connection((place[0], int(place[1]))) as slow:
        slow.sendall(b"POST /v2/models/model/infer HTTP/1.1\r\nHost: here\r\n")
        assert server.rows(GOOD)[0] == 200
        slow.sendall(b"Content-Length: 100\r\n\r\n{")
        assert server.rows(GOOD)[0] == 200


@pytest.mark.parametrize("url", ["https://here:1", "here:1", "127.0.0.1:8080", "http://"])
def test_a_client_refuses_https(url: str) -> None:
    with pytest.raises(StageFailed, match="expected http://HOST:PORT"):
        Client(url, "model", SIGNATURE, token=TOKEN)


def test_an_error_without_words_says_that_there_is_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(*_: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(DeadlineConnection, "request", end)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Client(f"http://127.0.0.1:{listener.getsockname()[1]}", "model", SIGNATURE) as client,
        pytest.raises(StageFailed, match=r": ConnectionResetError: no answer$"),
    ):
        client.predict([ROW])


def test_a_trickling_response_ends_with_the_timeout() -> None:
    ended, heads = threading.Event(), []

    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            heads.append(connection.recv(4096).partition(b" HTTP")[0])
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
            while not ended.wait(0.05):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/behind/"
        # 100 bytes would come in 5 s, each in time for a timeout of single reads.
        with (
            Client(url, "model", SIGNATURE, timeout_seconds=0.4) as client,
            pytest.raises(StageFailed, match="TimeoutError: timed out"),
        ):
            client.predict([ROW])
        ended.set()
        thread.join()
    assert heads == [b"POST /behind/predictions/model"]


def test_an_altered_artifact_is_not_served(artifact: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(artifact, tmp_path / "copy")
    payload = copy / "model.onnx"
    payload.chmod(0o644)
    payload.write_bytes(payload.read_bytes().replace(b"doubled", b"Doubled"))
    done = refused(copy)
    assert (done.returncode, "model.onnx is not the file" in done.stderr) == (2, True)


@pytest.mark.slow
def test_the_address_is_printed_as_one_line_of_json(artifact: Path) -> None:
    from tests.serve.served_here import COMPRESS, ROOT

    command = [*COMPRESS, "serve", str(artifact), "--port", "0", "--json"]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        place = json.loads(process.stdout.readline())
        process.terminate()
        assert process.wait(60) == 143
        assert process.stdout.read() == ""
    assert place.keys() == {"artifact", "url", "curl", "warnings", "others"}
    assert place["url"].endswith("/v2/models/model")
    assert place["url"] in place["curl"]


def refused(artifact: Path, *options: str, before: str = "") -> subprocess.CompletedProcess[str]:
    from tests.serve.served_here import ROOT

    code = before + "from compress.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", str(artifact), "--port", "0", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_without_the_extra_the_error_says_what_to_install(artifact: Path) -> None:
    done = refused(artifact, before="import sys; sys.modules['uvicorn'] = None; ")
    assert done.returncode == 4
    assert "pip install -e '.[server]'" in done.stderr
    assert done.stdout == ""


def test_a_token_that_is_too_short_is_refused(artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    done = refused(artifact, "--token-file", str(file))
    assert done.returncode == 2
    assert "found a token of 6 characters, expected 16 or more" in done.stderr
