"""What one connection may do to the built-in server: odd requests, many at once, and its end."""

import json
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.serve.attacks import SMALL, attacking, get, head, post, seconds_of
from tests.serve.served_here import TOKEN, Served, as_json, sealed, serving

GOOD = [0.0, 3.0, 1.5, -2.0]
REQUEST = as_json(GOOD)
LENGTH = f"Content-Length: {len(REQUEST)}\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"
AS_CHUNK = b"%x\r\n%s\r\n0\r\n" % (len(REQUEST), REQUEST)
UPGRADE = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sealed(tmp_path_factory.mktemp("connections") / "model").path


@pytest.fixture(scope="module")
def server(artifact: Path) -> Iterator[Served]:
    with serving(artifact) as running:
        yield running


def port_of(server: Served) -> int:
    return int(server.url.rpartition(":")[2])


def connected(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(server)), timeout=120)


def sent(server: Served, data: bytes, count: int) -> list[tuple[int, bytes, bytes]]:
    """Send bytes, and return status, head and body of so many answers."""
    with connected(server) as connection:
        connection.sendall(data)
        return answers(connection, count)


def answers(connection: socket.socket, count: int = 1) -> list[tuple[int, bytes, bytes]]:
    """Return status, head and body of so many answers; of fewer, where the connection ends."""
    received, found = b"", []
    while len(found) < count and (part := connection.recv(65536)):
        received += part
        while (at := received.find(b"\r\n\r\n")) >= 0:
            head = received[: at + 4]
            length = int((re.findall(rb"content-length: (\d+)", head) or [b"0"])[0])
            if len(received) < len(head) + length:
                break
            status = int(head.split()[1])
            found += [(status, head, received[len(head) :][:length])] if status != 100 else []
            received = received[len(head) + length :]
    assert not received
    return found


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"GET /v2/health/live\r\n\r\n", 400, "HTTP/0.9, expected HTTP/1.1"),
        (b"GET /v2/health/live HTTP/2.0\r\n\r\n", 400, "HTTP/2.0, expected HTTP/1.1"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400, "not an HTTP/1.1"),
        (head(f"{LENGTH}Content-Length: 9\r\n") + REQUEST, 400, "Duplicate Content-Length"),
        (head(LENGTH + CHUNKED) + b"0\r\n\r\n" + SMALL, 400, "Transfer-Encoding can't be present"),
        (head("Transfer-Encoding: gzip, chunked\r\n"), 400, "'gzip, chunked', expected chunked"),
        (head("Content-Length: -1\r\n"), 400, "Invalid character in Content-Length"),
        (head(CHUNKED) + b"-1\r\nx\r\n0\r\n\r\n" + SMALL, 400, "Invalid character in chunk size"),
        (SMALL[:-2] + b"a: b\r\n" * 200 + b"\r\n" + SMALL, 431, "more than 128 headers"),
        (SMALL[:-2] + b"a: %s\r\n\r\n" % (b"x" * 70_000) + SMALL, 431, "more than 65536 bytes"),
        (b"CONNECT here:1 HTTP/1.1\r\n\r\n" + SMALL, 400, "invalid url"),
        (b"GET / HTTP/1.1\r\nX: a\r\n b\r\n\r\n", 400, "Unexpected whitespace"),
        (head("Content-Length: 9\r\nExpect: 100-continue\r\n", "wrong"), 401, "no valid token"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_http_gets_one_error_response(
    server: Served, data: bytes, status: int, words: str
) -> None:
    """Also where another request is hidden behind it: that is never answered."""
    ((found, head, body),) = sent(server, data, 2)
    assert (found, words in json.loads(body)["error"]) == (status, True), body
    assert b"connection: close" in head


@pytest.mark.parametrize(
    "data",
    [
        post(REQUEST) * 50,
        (head(CHUNKED + "Content-Type: application/json\r\n") + AS_CHUNK + b"\r\n") * 50,
        head(UPGRADE + LENGTH) + REQUEST + post(REQUEST),
        head(UPGRADE + LENGTH, "wrong") + REQUEST + post(REQUEST),
        head(CHUNKED) + AS_CHUNK + b"\r\n" + head(UPGRADE + LENGTH) + REQUEST + post(REQUEST),
        head(CHUNKED) + AS_CHUNK + b"Content-Encoding: gzip\r\n\r\n" + post(REQUEST),
        b"\r\n" * 20 + post(REQUEST) + b"\r\n" * 20 + post(REQUEST),
        post(b"x" * 100_000, token="wrong") + post(REQUEST) * 3,
    ],
    ids=[
        "lengths",
        "chunks",
        "upgrade",
        "refused upgrade",
        "upgrade behind chunks",
        "trailer",
        "line breaks",
        "refused",
    ],
)
def test_pipelined_requests_are_answered_in_their_order(server: Served, data: bytes) -> None:
    expected = [401 if b"wrong" in part else 200 for part in data.split(b"POST ")[1:]]
    received = sent(server, data, len(expected))
    assert [status for status, _, _ in received] == expected
    right = [body for _, _, body in received if b'"data": [0.0,6.0,3.0,-4.0]' in body]
    assert len(right) == expected.count(200)


def test_a_request_that_comes_byte_by_byte_is_answered(server: Served) -> None:
    with connected(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post(REQUEST) + SMALL:
            connection.sendall(bytes([byte]))
        assert [status for status, _, _ in answers(connection, 2)] == [200, 200]


@pytest.mark.slow
def test_requests_of_disconnected_clients_are_not_computed(artifact: Path) -> None:
    with serving(artifact, "--workers", "1", "--max-rows", "1") as server:
        slow = as_json([3000.0, 0.0, 0.0, 0.0])
        began = time.monotonic()
        assert server.rows([3000.0, 0, 0, 0], timeout=60)[0] == 200
        once = time.monotonic() - began
        clients = [connected(server) for _ in range(40)]
        for client in clients:
            client.sendall(post(slow))
        until(lambda: metric(server, "inference_queue_length") == 40)
        for client in clients:
            client.close()
        began = time.monotonic()
        assert server.rows(GOOD, timeout=60)[0] == 200
        # What runs is not interrupted; the 39 behind it are dropped.
        assert time.monotonic() - began < 20 * once
        assert metric(server, 'inference_requests_total{model="model",status="499"') == 40


def metric(server: Served, name: str) -> float:
    _, _, body = server.ask(path="/metrics", method="GET")
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in body.decode().splitlines()
        if line[:1] != "#" and line.startswith(name)
    )


def until(reached: object) -> None:
    assert callable(reached)
    due = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < due
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param("1", marks=pytest.mark.soak), "2"])
def test_no_connection_is_reset_when_the_server_stops(artifact: Path, processes: str) -> None:
    """Each client asks again and again on one connection, until that says that it was the last."""
    with serving(artifact, "--processes", processes) as server:
        ends: list[str] = []
        busy = [threading.Thread(target=ask_until_closed, args=(server, ends)) for _ in range(8)]
        with connected(server) as idle, connected(server) as halfway:
            idle.sendall(SMALL)
            halfway.sendall(SMALL + SMALL[:9])
            assert [answers(each)[0][0] for each in (idle, halfway)] == [200, 200]
            for thread in busy:
                thread.start()
            time.sleep(0.5)
            server.process.send_signal(signal.SIGTERM)
            for quiet in (idle, halfway):
                assert quiet.recv(1) == b"", "closed, and not reset"
            for thread in busy:
                thread.join(120)
        assert server.process.wait(120) == 143
    assert ends == ["close"] * 8


def ask_until_closed(server: Served, ends: list[str]) -> None:
    with connected(server) as connection:
        head = b""
        try:
            while b"connection: close" not in head:
                connection.sendall(post(REQUEST))
                ((_, head, _),) = answers(connection)
                time.sleep(0.005)
            ends.append("close")
        except (OSError, ValueError) as error:
            ends.append(repr(error))


@pytest.mark.slow
def test_a_server_under_attack_stops_too(artifact: Path) -> None:
    with (
        serving(artifact) as server,
        attacking("pipelined requests, no answer read", port_of(server)),
    ):
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 143


@pytest.mark.slow
def test_connections_are_bounded_by_the_files_that_may_be_open(artifact: Path) -> None:
    """The limit is raised as far as it may be; here it may not."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(artifact) as server:
        assert psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE)[0] >= min(
            4096 + 128, limits[1]
        )
    few = ["prlimit", "--nofile=200:200"]
    with (
        serving(artifact, before=few) as server,
        attacking("1,100 kept connections", port_of(server)),
    ):
        for _ in range(5):
            assert seconds_of(None, port_of(server), ("GET", "/v2/health/live")) < 30
            time.sleep(0.05)


@pytest.mark.slow
def test_a_client_that_reads_no_response_is_disconnected(artifact: Path) -> None:
    limits = ("--max-rows", "400000", "--max-mib", "64")
    with serving(artifact, *limits) as server, connected(server) as unread:
        rows = bytes(16 * 300_000)
        raw = "Content-Type: application/octet-stream\r\nAccept: application/x-npz\r\n"
        unread.sendall(head(f"{raw}Content-Length: {len(rows)}\r\n") + rows + get("/metrics"))
        unread.recv(100)
        assert metric(server, "inference_requests_total") == 1
        connections = psutil.Process(server.process.pid).net_connections
        until(lambda: len([c for c in connections() if c.status == "ESTABLISHED"]) == 0)
        assert server.rows(GOOD)[0] == 200


def test_curl_with_expect_continue_gets_one_401(server: Served, tmp_path: Path) -> None:
    """curl's -d says that a body is a form; and it keeps its connection."""
    file = tmp_path / "request.json"
    file.write_bytes(REQUEST)
    url = f"{server.url}/v2/models/model/infer"
    one = ["-s", "-w", "%{http_code} %{num_connects};", "-o", "-", "-d", f"@{file}", url]
    authorization = ["-H", f"Authorization: Bearer {TOKEN}"]
    command = ["curl", *authorization, *one, "--next", *authorization, "--http2", *one]
    command += ["--next", *authorization, "-H", "Expect: 100-continue", *one]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert re.findall(r"(\d+) (\d);", done.stdout) == [("200", "1"), ("200", "0"), ("200", "0")]
    assert done.stdout.count('"data": [0.0,6.0,3.0,-4.0]') == 3
