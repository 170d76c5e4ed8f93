"""Clients that misuse `/v1`: each gets one error in OpenAI's form, and others their answers."""

import json
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from compress.artifacts.artifact import Artifact
from tests.serve.openai.asking import (
    CHAT,
    COMPLETIONS,
    MODELS,
    USER,
    Replies,
    Reply,
    asked,
    connected,
    contents,
    counted,
    counts,
    error_of,
    events,
    half_sent,
    metric,
    post,
    request,
    sent,
    text_of,
    until,
)
from tests.serve.openai.session_decoder import serving_by_session
from tests.serve.served_here import TOKEN, Served

QUEUE = 8  # of conftest.py
NORMAL: dict[str, Any] = {"prompt": "Hé", "max_tokens": 12}
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 91, "temperature": 0, "stream": True}
CHUNKED = "Transfer-Encoding: chunked\r\n"
DEEP = b"[" * 10_000 + b"]" * 10_000
HUGE = b"9" * 4300
"""As many digits as Python reads."""


@pytest.fixture(scope="module")
def normal(server: Served) -> tuple[str, int]:
    """Return the text of a normal request, and the server's number of threads."""
    texts = [text_of(server, **NORMAL) for _ in range(8)]
    assert len({*texts}) == 1
    return texts[0], psutil.Process(server.process.pid).num_threads()


@pytest.fixture(autouse=True)
def _stays_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """After whatever a test did, no request and no thread is left over, and none failed."""
    if "server" not in request.fixturenames:
        yield
        return
    server: Served = request.getfixturevalue("server")
    text, threads = request.getfixturevalue("normal")
    until(lambda: metric(server, "inference_queue_length") == 0)
    yield
    with counted(server, {200: 1}):
        assert text_of(server, **NORMAL) == text
    assert metric(server, "inference_queue_length") == 0
    assert metric(server, 'inference_requests_total{model="model",status="500",version="1"}') == 0
    assert psutil.Process(server.process.pid).num_threads() >= threads


def with_setting(name: str, value: bytes) -> bytes:
    return b'{"prompt": "a", "%s": %s}' % (name.encode(), value)


def chat(message: bytes) -> bytes:
    return b'{"messages": [%s]}' % message


BODIES = {
    "nothing": (b"", None),
    "half of an object": (b'{"prompt": "a"', None),
    "not UTF-8": (b'{"prompt": "\xff"}', None),
    "two values": (b'{"prompt": "a"} {}', None),
    "a list": (b'[{"prompt": "a"}]', None),
    "null": (b"null", None),
    "nested 10,000 deep": (DEEP, None),
    "a prompt nested 10,000 deep": (b'{"prompt": %s}' % DEEP, None),
    "an unknown setting nested 190 deep": (
        with_setting("x", b"[" * 190 + b"]" * 190),
        "x",
    ),
    "a surrogate in a prompt": (rb'{"prompt": "\ud800"}', None),
    "a surrogate in a stop": (with_setting("stop", rb'["\udfff"]'), None),
    "a surrogate in a chat": (chat(rb'{"role": "user", "content": "\ud800x"}'), None),
    "a zero byte outside of a text": (b'{"prompt": "a"}\0', None),
    "a prompt of texts": (b'{"prompt": ["a", "b"]}', "prompt"),
    "a prompt of lists": (b'{"prompt": [[1], [2]]}', "prompt"),
    "no prompt": (b'{"prompt": null}', "prompt"),
    "an empty prompt": (b'{"prompt": []}', "prompt"),
    "a prompt of 60,000 characters": (b'{"prompt": "%s"}' % (b"a" * 60_000), "prompt"),
    "a prompt of 40,000 tokens": (b'{"prompt": [%s1]}' % (b"1," * 39_999), "prompt"),
    "a token of 4,300 digits": (b'{"prompt": [%s]}' % HUGE, "prompt"),
    "a token that is no number": (b'{"prompt": [1, true]}', "prompt"),
    "a limit of 4,300 digits": (with_setting("max_tokens", HUGE), "max_tokens"),
    "a limit of 4,301 digits": (with_setting("max_tokens", HUGE + b"9"), None),
    "a negative limit": (with_setting("max_tokens", b"-1"), "max_tokens"),
    "a limit with a fraction": (with_setting("max_tokens", b"1.5"), "max_tokens"),
    "an infinite temperature": (with_setting("temperature", b"1e999"), "temperature"),
    "NaN as temperature": (with_setting("temperature", b"NaN"), "temperature"),
    "a negative top_p": (with_setting("top_p", b"-1e-300"), "top_p"),
    "a seed that is a text": (with_setting("seed", b'"1"'), "seed"),
    "a seed of 60,000 digits": (with_setting("seed", b"9" * 60_000), None),
    "a stop of 60,000 characters": (with_setting("stop", b'"%s"' % (b"x" * 60_000)), "stop"),
    "30,000 stops": (with_setting("stop", b'["a"%s]' % (b',"a"' * 20_000)), "stop"),
    "an empty stop": (with_setting("stop", b'["a", ""]'), "stop"),
    "a stop that is a number": (with_setting("stop", b"1"), "stop"),
    "stream as a text": (with_setting("stream", b'"true"'), "stream"),
    "stream options that are a list": (with_setting("stream_options", b"[]"), "stream_options"),
    "usage as a number": (
        with_setting("stream_options", b'{"include_usage": 1}'),
        "stream_options",
    ),
    "an unknown stream option": (with_setting("stream_options", b'{"x": 1}'), "stream_options"),
    "the model as a number": (with_setting("model", b"0"), "model"),
    "several answers": (with_setting("n", HUGE), "n"),
    "an unknown setting of 60,000 characters": (with_setting("x" * 60_000, b"1"), "x" * 64),
    "1,000 unknown settings": (
        b'{"prompt": "a"%s}' % b"".join(b', "%d": 0' % place for place in range(1000)),
        "0",
    ),
    "no messages": (b'{"messages": []}', "messages"),
    "a message that is a text": (chat(b'"hi"'), "messages"),
    "a message without a text": (chat(b'{"role": "user", "content": null}'), "messages"),
    "a role of 60,000 characters": (
        chat(b'{"role": "%s", "content": ""}' % (b"u" * 60_000)),
        "messages",
    ),
    "a role that the template refuses": (chat(rb'{"role": "\u0000", "content": ""}'), "messages"),
    "a message of 60,000 characters": (
        chat(b'{"role": "user", "content": "%s"}' % (b"a" * 60_000)),
        "messages",
    ),
    "1,500 messages": (
        chat(b",".join([b'{"role": "user", "content": "hi"}'] * 1500)),
        "messages",
    ),
    "an image": (
        chat(b'{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}'),
        "messages",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_wrong_gets_one_400(server: Served, name: str) -> None:
    body, param = BODIES[name]
    path = CHAT if b'"messages"' in body else COMPLETIONS
    with counted(server, {400: 1}):
        (reply,) = sent(server, request(body, path))
    assert (reply.status, error_of(reply)["param"]) == (400, param), reply


def test_bodies_that_are_too_large_are_not_read_into_memory(server: Served) -> None:
    before = psutil.Process(server.process.pid).memory_info().rss
    body = b'{"prompt": "%s"}' % (b"a" * 40 * 2**20)
    with counted(server, {413: 2}):
        (known,) = sent(server, request(body))
        (chunked,) = sent(
            server, request(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), headers=CHUNKED)
        )
    for reply in (known, chunked):
        assert (reply.status, error_of(reply)["code"]) == (413, None)
    assert psutil.Process(server.process.pid).memory_info().rss - before < 20 * 2**20


def test_zero_bytes_and_odd_characters_are_texts(server: Served) -> None:
    texts = ["\0", "a\0b", "\x1b[2J", "\ufffe\uffff", "🙂", "<|end|>", "\r\n\r\n", "\U0010ffff"]
    with counted(server, {200: 3 * len(texts)}):
        for text in texts:
            status, answer = asked(server, prompt=text, max_tokens=2, stop=[text, "\0" * 256])
            assert (status, answer["usage"]["completion_tokens"] > 0) == (200, True)
            parts = [{"type": "text", "text": text}] * 2
            for content in (text, parts):
                message = {"role": "user", "content": content}
                assert events(server, CHAT, messages=[message], max_tokens=2)


@pytest.mark.parametrize(
    "authorization",
    [
        *(b"", b"Bearer", b"Bearer ", b"Bearer wrong", TOKEN.encode(), f"Bearer{TOKEN}".encode()),
        *(f"Basic {TOKEN}".encode(), f"Bearer {TOKEN} ".encode() + b"x", b"Bearer \xe9\xff"),
        pytest.param(b"Bearer " + TOKEN.encode() * 2000, id="40,000 characters"),
    ],
)
def test_without_the_token_nothing_is_answered(server: Served, authorization: bytes) -> None:
    for path, method, count in ((COMPLETIONS, "POST", 1), (CHAT, "POST", 1), (MODELS, "GET", 0)):
        data = request(**LONG, path=path, method=method)
        data = data.replace(f"Bearer {TOKEN}".encode(), authorization)
        with counted(server, {401: count} if count else {}):
            (reply,) = sent(server, data)
        assert (reply.status, error_of(reply)["code"]) == (401, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("form", ["bearer {}", "BEARER   {}", "Bearer {} ", "Bearer {}\t \t"])
def test_the_token_is_read_as_http_says(server: Served, form: str) -> None:
    """RFC 9110: the scheme in any case, blanks before the token and behind the value."""
    data = request(b"", MODELS, method="GET")
    data = data.replace(f"Bearer {TOKEN}".encode(), form.format(TOKEN).encode())
    (reply,) = sent(server, data)
    assert reply.status == 200


def test_other_methods_and_paths(server: Served) -> None:
    methods = ["GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"]
    for path in (COMPLETIONS, CHAT):
        with counted(server, {405: len(methods)}):
            for method in methods:
                (reply,) = sent(server, request(b"", path, method=method))
                error_of(reply)
                assert (reply.status, reply.headers["allow"]) == (405, "POST")
    paths = ["/", "/v1", "/v1/completions/", "/v1//completions", "/v1/../v1/completions"]
    paths += ["/v1/embeddings", f"{MODELS}/", f"{MODELS}/%FF%00", "/V1/models", "/" + "x" * 60_000]
    with counted(server, {}):
        for path in paths:
            (reply,) = sent(server, request(path=path, **LONG))
            assert (reply.status, error_of(reply)["code"]) == (404, "not_found")
        (reply,) = sent(server, request(b"", MODELS))
        error_of(reply)
        assert (reply.status, reply.headers["allow"]) == (405, "GET, HEAD")
    with counted(server, {200: 1}):
        assert sent(server, request(path=f"{COMPLETIONS}?a=%00#b", **NORMAL))[0].status == 200


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400),
        (request(**LONG).replace(b"HTTP/1.1", b"HTTP/2.0"), 400),
        (request(**LONG, path="/v1/\x00"), 400),
        (request(**LONG, method="BREW"), 400),
        (request(**LONG, headers="Content-Length: 9\r\n"), 400),
        (request(**LONG, headers="Transfer-Encoding: gzip, chunked\r\n"), 400),
        (request(**LONG, headers="X: y\r\n" * 200), 431),
        (request(**LONG, headers=f"X: {'y' * 70_000}\r\n"), 431),
        (request(**LONG, headers="X: y\r\n" * 20_000), 431),
    ],
    ids=["TLS", "HTTP/2", "path", "method", "lengths", "encoding", "headers", "header", "flood"],
)
def test_malformed_http_gets_an_error_in_openais_form(
    server: Served, data: bytes, status: int
) -> None:
    """Also where another request is hidden behind it: that is never answered."""
    with counted(server, {}):
        (reply,) = sent(server, data + request(**LONG), 2)
    error_of(reply)
    assert (reply.status, reply.headers["connection"]) == (status, "close")


def test_pipelined_requests_are_answered_in_their_order(server: Served) -> None:
    chunk = json.dumps(NORMAL).encode()
    chunk = b"".join(b"1\r\n%c\r\n" % byte for byte in chunk) + b"0\r\n\r\n"
    data = [
        (request(**NORMAL), 200),
        (request(**LONG), 200),
        (request(b"{"), 400),
        (request(chunk, headers=CHUNKED), 200),
        (request(**LONG, token="x" * 20), 401),
        (request(**LONG, path=CHAT), 400),
        (request(b"x" * 2**21), 413),
        (request(**LONG, messages=[USER]), 400),
        (request(**LONG), 200),
    ]
    with counted(server, {200: 8, 400: 6, 401: 2, 413: 2}):
        replies = sent(server, b"".join(part for part, _ in data) * 2, 2 * len(data))
    assert [reply.status for reply in replies] == [status for _, status in data] * 2
    for reply in replies:
        if reply.status != 200:
            error_of(reply)
    streams = [reply.body for reply in replies if "event-stream" in reply.headers["content-type"]]
    texts = {"".join(each["choices"][0]["text"] for each in contents(body)) for body in streams}
    assert (len(streams), len(texts)) == (4, 1)


def test_a_request_that_comes_byte_by_byte_is_answered(server: Served) -> None:
    with counted(server, {200: 1}), connected(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request(**LONG):
            connection.sendall(bytes([byte]))
        (reply,) = Replies(connection).read()
    assert contents(reply.body)


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(server: Served) -> None:
    expected = events(server, **LONG)
    with counted(server, {200: 2, 400: 1}):
        for body in (json.dumps(LONG), json.dumps({**LONG, "stream": False}), "{"):
            data = request(body.encode()).replace(b"HTTP/1.1", b"HTTP/1.0")
            with connected(server) as connection:
                connection.sendall(data)
                received = b"".join(iter(lambda each=connection: each.recv(65536), b""))
            head, _, answer = received.partition(b"\r\n\r\n")
            assert (b"connection: close" in head, b"transfer-encoding" in head) == (True, False)
            if b"event-stream" in head:
                assert len(contents(answer)) == len(expected)
            else:
                assert b"content-length: %d" % len(answer) in head


def test_clients_that_send_slowly_hold_no_worker(server: Served, normal: tuple[str, int]) -> None:
    with counted(server, {499: QUEUE - 1, 200: 3}), ExitStack() as clients:
        for _ in range(20):  # without a whole head, they do not count
            clients.enter_context(connected(server)).sendall(request(**LONG)[:60])
        for _ in range(QUEUE - 1):
            clients.enter_context(half_sent(server, **LONG))
        assert [text_of(server, **NORMAL) for _ in range(3)] == [normal[0]] * 3


def test_above_the_queue_requests_are_refused_until_others_leave(server: Served) -> None:
    with counted(server, {499: QUEUE, 503: 3}), ExitStack() as clients:
        for _ in range(QUEUE):
            clients.enter_context(half_sent(server, **LONG))
        for refused in (request(**NORMAL), request(**LONG), request(b"{", CHAT)):
            (reply,) = sent(server, refused)
            assert (reply.status, error_of(reply)["code"]) == (503, "overloaded")
            assert reply.headers["retry-after"] == "1"
        assert asked(server, MODELS)[0] == 405  # all else is answered


@pytest.mark.parametrize("bytes_read", [0, 1, 2000])
@pytest.mark.parametrize("resets", [False, True], ids=["closes", "resets"])
def test_clients_that_leave_are_counted_once(server: Served, bytes_read: int, resets: bool) -> None:
    before = counts(server).total()
    for _ in range(20):
        with post(server, **LONG) as connection:
            if bytes_read:
                assert connection.recv(bytes_read, socket.MSG_WAITALL)
            if resets:
                unsent_is_dropped = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, unsent_is_dropped)
    until(lambda: counts(server).total() >= before + 20)
    assert counts(server).total() == before + 20


def test_a_client_that_leaves_after_its_stream(server: Served) -> None:
    with counted(server, {200: 10}):
        for _ in range(10):
            with post(server, **LONG) as connection:
                (reply,) = Replies(connection).read()
                assert contents(reply.body)


@pytest.mark.soak
def test_a_client_that_never_reads_holds_up_nobody(server: Served, normal: tuple[str, int]) -> None:
    """Its streams fill the kernel's buffers; then one of them waits, until it is disconnected."""
    with connected(server, receive_bytes=1) as connection:
        connection.sendall(request(**LONG) * 400)

        def none_goes_on() -> bool:
            before = counts(server)
            time.sleep(0.3)
            return counts(server) == before

        until(none_goes_on)
        assert metric(server, "inference_queue_length") == 1
        with counted(server, {200: 5}):
            assert [text_of(server, **NORMAL) for _ in range(5)] == [normal[0]] * 5
        with counted(server, {499: 1}):
            pass  # after some seconds


def test_a_stop_is_found_however_it_is_split_into_tokens(server: Served) -> None:
    body = {"prompt": "hello", "max_tokens": 40}
    text = text_of(server, **body)
    for size in (1, 2, 5, 9):
        for start in range(0, len(text) - size, 3):
            stop = text[start : start + size]
            expected = text[: text.index(stop)]
            assert text_of(server, **body, stop=["\0none\0", stop]) == expected
            parts = events(server, **body, temperature=0, stop=[stop])
            assert "".join(each["choices"][0]["text"] for each in parts) == expected
            assert parts[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.slow
def test_a_stopping_server_completes_or_ends_each_request(folder: Artifact) -> None:
    """What is complete within the time limit is answered; the rest gets an error, and no reset."""
    options = ("--workers", "2", "--seconds", "2")
    with (
        serving_by_session(folder, *options, token_seconds=0.05, stop_seconds=1) as server,
        ExitStack() as clients,
    ):
        with counted(server, {408: 1}), half_sent(server, **LONG) as late:
            (reply,) = Replies(late).read()
            assert (reply.status, reply.headers["connection"]) == (408, "close")
            assert "the body was not received within 2 s" in error_of(reply)["message"]
        few, many = LONG | {"max_tokens": 6}, LONG | {"stream": False}
        streams = [clients.enter_context(post(server, **body)) for body in (few, LONG)]
        waiting = [clients.enter_context(post(server, **body)) for body in (many, LONG)]
        waiting.append(clients.enter_context(half_sent(server, **LONG)))
        begun = [Replies(each) for each in streams]
        assert all(each.recv(1, socket.MSG_PEEK) for each in streams)
        server.process.send_signal(signal.SIGTERM)
        complete, cut = (each.read()[0] for each in begun)
        refused = [Replies(each).read()[0] for each in waiting]
        assert server.process.wait(120) == 143
    assert contents(complete.body)[-1]["choices"][0]["finish_reason"] == "length"
    *parts, last, end = cut.body.split(b"\n\n")
    assert (len(parts) > 6, end) == (True, b"")
    assert not any(b"[DONE]" in each or b"error" in each for each in parts)
    refused.append(Reply(503, {"content-type": "application/json"}, last.removeprefix(b"data: ")))
    for reply in refused:
        assert (reply.status, error_of(reply)["code"]) == (503, "overloaded")
        assert "the server stops" in error_of(reply)["message"]
