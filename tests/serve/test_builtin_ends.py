"""How the built-in server ends requests that take too long, and how it ends itself."""

import shutil
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from compress.common.errors import StageFailed
from compress.serve.client.client import Client, OpenInference
from tests.forging import forge
from tests.serve.served_here import SIGNATURE, TOKEN, Served, sealed, serving

GOOD = [0.0, 3.0, 1.5, -2.0]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sealed(tmp_path_factory.mktemp("ends") / "model").path


@pytest.fixture(scope="module")
def impatient(artifact: Path) -> Iterator[Served]:
    """A request may take 0.15 seconds."""
    with serving(artifact, "--seconds", "0.15") as running:
        yield running


def place_of(server: Served) -> tuple[str, int]:
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def test_a_model_past_the_deadline_gives_504(impatient: Served) -> None:
    status, answer = impatient.rows([1500.0, 0.0, 0.0, 0.0])
    assert (status, answer["error"]) == (504, "the model did not answer within 0.15 s")
    # What was given up still runs to its end; then the server is as before.
    until(lambda: impatient.rows(GOOD)[0] == 200)


def test_a_body_that_does_not_arrive_gives_408(impatient: Served) -> None:
    head = f"POST /v2/models/model/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    with socket.create_connection(place_of(impatient), timeout=120) as slow:
        slow.sendall(
            f"{head}Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{{".encode()
        )
        answer = b"".join(iter(lambda: slow.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the body was not received within 0.15 s" in answer


@pytest.mark.soak
def test_a_head_that_does_not_arrive_closes_the_connection(impatient: Served) -> None:
    with (
        socket.create_connection(place_of(impatient), timeout=60) as silent,
        socket.create_connection(place_of(impatient), timeout=60) as half,
        socket.create_connection(place_of(impatient), timeout=60) as endless,
    ):
        half.sendall(b"POST /v2/models/model/infer HTTP/1.1\r\nHost: x\r\n")
        with pytest.raises(ConnectionError):
            endless.sendall(b"GET / HTTP/1.1\r\n")
            for _ in range(1000):
                endless.sendall(b"X: %s\r\n" % (b"x" * 100_000))
        for quiet in (silent, half):
            with pytest.raises(ConnectionError):
                assert quiet.recv(1) == b""
                raise ConnectionResetError
    until(lambda: impatient.rows(GOOD)[0] == 200)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_requests_in_progress_are_answered_before_the_server_stops(
    artifact: Path, number: signal.Signals, code: int
) -> None:
    with serving(artifact, "--workers", "2", "--max-rows", "1") as server:
        with ThreadPoolExecutor(6) as pool:
            futures = [pool.submit(server.rows, [100.0, float(i), 0, 0]) for i in range(6)]
            until(lambda: depth(server) >= 6 or all(f.done() for f in futures))
            server.process.send_signal(number)
            answers = [future.result() for future in futures]
        assert server.process.wait(120) == code
    assert [status for status, _ in answers] == [200] * 6
    assert [answer["outputs"][2]["data"] for _, answer in answers] == [[i] for i in range(6)]
    assert not psutil.pid_exists(server.process.pid)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(place_of(server))


@pytest.mark.slow
def test_a_client_reconnects_to_a_restarted_server(artifact: Path) -> None:
    with serving(artifact) as server:
        form = OpenInference()
        with Client(server.url, "model", SIGNATURE, token=TOKEN, form=form) as client:
            import numpy as np

            rows = [np.array([GOOD], np.float32)]
            expected = client.predict(rows)
            server.process.kill()
            server.process.wait(120)
            with pytest.raises(StageFailed, match="ConnectionRefusedError"):
                client.predict(rows)
            port = str(place_of(server)[1])
            with serving(artifact, "--port", port) as again:
                assert again.url == server.url
                assert all(map(np.array_equal, client.predict(rows), expected))


def test_a_port_in_use_is_named_in_the_error(artifact: Path, impatient: Served) -> None:
    from tests.serve.http.test_uvicorn_server import refused

    port = str(place_of(impatient)[1])
    done = refused(artifact, "--port", port)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}: cannot listen there" in done.stderr


def depth(server: Served) -> float:
    _, _, body = server.ask(path="/metrics", method="GET")
    (line,) = [x for x in body.decode().splitlines() if x.startswith("inference_queue_length{")]
    return float(line.rsplit(" ", 1)[1])


def until(reached: object) -> None:
    assert callable(reached)
    due = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < due
        time.sleep(0.01)


@pytest.mark.slow
def test_several_processes_answer_at_one_address_and_end_together(artifact: Path) -> None:
    with serving(artifact, "--processes", "2") as server:
        children = psutil.Process(server.process.pid).children()
        assert len(children) == 2
        parent = psutil.Process(server.process.pid)
        until(lambda: not parent.net_connections())  # closed just after the address is printed
        with ThreadPoolExecutor(8) as pool:
            answers = [*pool.map(server.rows, [[0.0, float(i % 8), 0, 0] for i in range(40)])]
        assert [answer["outputs"][2]["data"] for _, answer in answers] == [
            [i % 8] for i in range(40)
        ]
        _, _, body = server.ask(path="/metrics", method="GET")
        assert (
            'inference_requests_total{model="model",status="200",version="1"} 40.0' in body.decode()
        )
        children[0].kill()  # the server does not go on with half of its processes
        assert server.process.wait(120) == 1
    _, left = psutil.wait_procs(children, timeout=60)
    assert left == []


@pytest.mark.slow
def test_errors_of_server_processes_have_no_traceback(artifact: Path, tmp_path: Path) -> None:
    from tests.serve.http.test_uvicorn_server import refused

    copy = shutil.copytree(artifact, tmp_path / "copy")
    forge(copy, "model.onnx", b"")
    done = refused(copy, "--processes", "2")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[-1] == "error: a process of the server ended by itself"
    assert all(line.startswith("error: ") for line in lines), lines
    assert "model.onnx: onnxruntime cannot load it: " in lines[0]
    done = refused(copy)
    assert (done.returncode, done.stderr.splitlines()) == (2, lines[:1])


@pytest.mark.slow
def test_processes_do_not_outlive_a_server_that_is_killed(artifact: Path) -> None:
    with serving(artifact, "--processes", "2") as server:
        children = psutil.Process(server.process.pid).children()
        server.process.kill()
        _, left = psutil.wait_procs(children, timeout=120)
        assert left == []


@pytest.mark.slow
def test_processes_stop_with_their_server(artifact: Path) -> None:
    with serving(artifact, "--processes", "2") as server:
        children = psutil.Process(server.process.pid).children()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(120) == 143
        assert not any(child.is_running() for child in children)
