"""Requests to `/v1`, how their responses are read, and what `/metrics` counts of them."""

import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import httptools

from tests.serve.served_here import TOKEN, Served

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
USER = {"role": "user", "content": "hi"}


def asked(server: Served, path: str = COMPLETIONS, **body: Any) -> tuple[int, dict[str, Any]]:
    status, _, answer = server.ask(json.dumps(body).encode(), path=path)
    return status, json.loads(answer)


def events(server: Served, path: str = COMPLETIONS, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, which has to end with [DONE]."""
    content = json.dumps({**body, "stream": True}).encode()
    status, headers, answer = server.ask(content, path=path)
    assert (status, headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8"), answer
    return contents(answer)


def contents(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream's body, which has to end with [DONE]."""
    *lines, last, end = stream.decode().split("\n\n")
    assert (last, end) == ("data: [DONE]", ""), stream[-300:]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def text_of(server: Served, **body: Any) -> str:
    status, answer = asked(server, temperature=0, **body)
    assert status == 200, answer
    text: str = answer["choices"][0]["text"]
    return text


class Reply(NamedTuple):
    """A response."""

    status: int
    headers: dict[str, str]
    body: bytes


class Replies:
    """Parses the responses on a connection; `received` are those that are complete."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._parser = httptools.HttpResponseParser(self)
        self.received: list[Reply] = []
        self.body = b""
        """Of the response that is being received."""

    def read(self, count: int = 1) -> list[Reply]:
        """Return all responses once there are so many; fewer, where the connection ends."""
        while len(self.received) < count and (part := self._connection.recv(65536)):
            self._parser.feed_data(part)
        return self.received

    def on_message_begin(self) -> None:
        self.body, self._headers = b"", dict[str, str]()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.received.append(Reply(self._parser.get_status_code(), self._headers, self.body))


def connected(server: Served, receive_bytes: int | None = None) -> socket.socket:
    """Return a connection; its receive buffer may be made small, so that a server has to wait."""
    connection = socket.socket()
    if receive_bytes:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.settimeout(30)
    connection.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    return connection


def request(
    body: bytes | None = None,
    path: str = COMPLETIONS,
    headers: str = "",
    method: str = "POST",
    token: str = TOKEN,
    **content: Any,
) -> bytes:
    """Return the bytes of a request with a body, or with settings as JSON."""
    body = json.dumps(content).encode() if body is None else body
    length = "" if "Transfer-Encoding" in headers else f"Content-Length: {len(body)}\r\n"
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
    return f"{head}{length}{headers}\r\n".encode() + body


def sent(server: Served, data: bytes, count: int = 1) -> list[Reply]:
    """Send bytes, and return so many responses."""
    with connected(server) as connection:
        connection.sendall(data)
        return Replies(connection).read(count)


def post(server: Served, **content: Any) -> socket.socket:
    """Send a request, and return its connection unread."""
    connection = connected(server)
    connection.sendall(request(**content))
    return connection


def half_sent(server: Served, **content: Any) -> socket.socket:
    """Send a request without the end of its body; return once the server reads it."""
    connection = connected(server)
    connection.sendall(request(**content, headers="Expect: 100-continue\r\n")[:-5])
    assert Replies(connection).read()[0].status == 100
    return connection


def metric(server: Served, line: str) -> float:
    text = server.ask(path="/metrics", method="GET")[2].decode()
    return sum(float(each.split()[-1]) for each in text.splitlines() if each.startswith(line))


def counts(server: Served) -> Counter[int]:
    """Return how many requests `/metrics` counts, by status."""
    text = server.ask(path="/metrics", method="GET")[2].decode()
    found = re.findall(r'^inference_requests_total\{.*status="(\d+)".*\} (\S+)', text, re.MULTILINE)
    return Counter({int(status): int(float(count)) for status, count in found})


@contextmanager
def counted(server: Served, expected: dict[int, int]) -> Iterator[None]:
    """Check that `/metrics` counts exactly these requests more, by status."""
    before = counts(server)
    yield
    # A request is counted after its last byte is sent.
    more: Counter[int] = Counter()
    deadline = time.monotonic() + 120
    while more != expected and time.monotonic() < deadline:
        more = counts(server) - before
    assert more == expected, f"counted {more}, expected {expected}"


def until(true: Any) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def error_of(reply: Reply) -> dict[str, Any]:
    """Return the error of a response, which has to be in OpenAI's form."""
    content = json.loads(reply.body)
    assert [*content] == ["error"], reply
    error: dict[str, Any] = content["error"]
    assert [*error] == ["message", "type", "param", "code"], reply
    assert 0 < len(error["message"]) < 1000, reply
    kind = "server_error" if reply.status >= 500 else "invalid_request_error"
    assert (error["type"], reply.headers["content-type"]) == (kind, "application/json"), reply
    return error
