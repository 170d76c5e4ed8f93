"""Hostile requests to `compress serve`, as data: what is sent, and to which kind of server.

`request_attacks.py` sends them and measures the server's health and memory meanwhile.
"""

import gzip
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

TOKEN = "a-token-of-the-tests"
MIB = 2**20
BODY = 8 * MIB - 256
"""Almost the largest body that a server takes."""
INFER, COMPLETIONS, CHAT = "/v2/models/model/infer", "/v1/completions", "/v1/chat/completions"
HEALTH = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"
PATHS = {"tensor": INFER, "text": INFER, "decoder": COMPLETIONS}
ANY = tuple(PATHS)


class HostileRequest(NamedTuple):
    """What is sent to a server, on how many connections, and how it goes on."""

    name: str
    servers: tuple[str, ...]
    """Kinds of server: `tensor`, `text`, `decoder`."""
    parts: Callable[[str], Iterator[bytes]]
    """Returns the raw bytes to send, in parts, for a kind of server."""
    connections: int = 1
    """At the same time."""
    pause: float = 0.0
    """Seconds between two parts."""
    ending: str = "reads"
    """`reads` all responses; `leaves` after the last byte; `shuts` the sending half first;
    `ignores` what is sent back, and stays."""


def head(path: str, headers: str = "", token: str = TOKEN, method: str = "POST") -> bytes:
    """Return the head of a request."""
    start = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
    return f"{start}{headers}\r\n".encode("latin-1")


def post(body: bytes, path: str, content_type: str = "application/json", more: str = "") -> bytes:
    """Return a request with a body."""
    return (
        head(path, f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{more}") + body
    )


def data(values: bytes, datatype: str = "FP32", shape: str = "[1, 4]") -> bytes:
    """Return the Open Inference Protocol's JSON of one tensor whose data is given."""
    start = b'{"inputs": [{"name": "x", "shape": %s, "datatype": "%s", "data": ['
    return start % (shape.encode(), datatype.encode()) + values + b"]}]}"


def texts(values: bytes, count: int) -> bytes:
    """Return the Open Inference Protocol's JSON of texts."""
    return data(values, "BYTES", f"[{count}]")


def prompt(value: bytes, more: bytes = b"") -> bytes:
    """Return the body of a completion."""
    return b'{"max_tokens": 2, "prompt": %s%s}' % (value, more)


def chat(messages: bytes, more: bytes = b"") -> bytes:
    """Return the body of a chat."""
    return b'{"max_tokens": 2, "messages": [%s]%s}' % (messages, more)


def npz_of_members(count: int) -> bytes:
    """Return an uncompressed zip of empty members."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for i in range(count):
            archive.writestr(f"{i}.npy", b"")
    return stream.getvalue()


def npy(shape: Sequence[int]) -> bytes:
    """Return an npy whose header promises a shape, without its data."""
    fields = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {tuple(shape)}, }}"
    return b"\x93NUMPY\x01\x00" + len(fields).to_bytes(2, "little") + fields.encode()


def png(width: int, height: int) -> bytes:
    """Return a small grey PNG that decodes to many pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        size = len(content).to_bytes(4, "big")
        return size + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    rows = zlib.compress(bytes(height * (width + 1)), 9)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size + b"\x08\x00\x00\x00\x00")
    return start + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def once(
    make: Callable[[], bytes], path: str = "", **more: Any
) -> Callable[[str], Iterator[bytes]]:
    """Return parts: one request whose body is made when it is sent."""

    def parts(kind: str) -> Iterator[bytes]:
        yield post(make(), path or PATHS[kind], **more)

    return parts


def raw(make: Callable[[str], bytes]) -> Callable[[str], Iterator[bytes]]:
    """Return parts: raw bytes for the path of a kind of server."""

    def parts(kind: str) -> Iterator[bytes]:
        yield make(PATHS[kind])

    return parts


def again(
    first: Callable[[str], bytes], then: bytes, count: int
) -> Callable[[str], Iterator[bytes]]:
    """Return parts: some bytes, and then others many times."""

    def parts(kind: str) -> Iterator[bytes]:
        yield first(PATHS[kind])
        for _ in range(count):
            yield then

    return parts


DEEP = b"[" * 4_000_000 + b"]" * 4_000_000
OF = HostileRequest
TEXT, DECODER, TENSOR = ("text",), ("decoder",), ("tensor",)
PLAIN = {"content_type": "text/plain"}
EMPTY_MESSAGE = b'{"role":"user","content":""}'
CHUNKED = "Transfer-Encoding: chunked\r\n"


def words(size: int) -> bytes:
    return b"a b " * (size // 4)


def letters(size: int) -> bytes:
    return b"a" * size


def spaces(size: int) -> bytes:
    return b" " * size


def emoji(size: int) -> bytes:
    return "🙂".encode() * (size // 4)


def marks(size: int) -> bytes:
    """Return a letter with as many combining marks, which normalizers sort."""
    return b"a" + "\u0301\u0323".encode() * (size // 4)


def cjk(size: int) -> bytes:
    return "漢".encode() * (size // 3)


def numbers(size: int) -> bytes:
    return b"1" * size


def one_wide(size: int) -> bytes:
    """Return letters and one emoji: Python then stores four bytes for each."""
    return b"a" * (size - 4) + "🙂".encode()


LONG = (words, letters, spaces, emoji, marks, cjk, numbers, one_wide)


def _texts() -> Iterator[HostileRequest]:
    for make in LONG:
        named = f"8 MiB of {make.__name__.replace('_', ' ')}"
        yield OF(f"{named} as a text", TEXT, once(lambda m=make: m(BODY), **PLAIN))
        yield OF(
            f"{named} as a prompt", DECODER, once(lambda m=make: prompt(b'"%s"' % m(BODY - 64)))
        )
        chatted = b'{"role": "user", "content": "%s"}'
        yield OF(
            f"{named} in a chat",
            DECODER,
            once(lambda m=make, c=chatted: chat(c % m(BODY - 128)), CHAT),
        )
    yield OF("8 MiB of zero bytes as a text", TEXT, once(lambda: bytes(BODY), **PLAIN))
    yield OF("8 MiB that are no UTF-8 as a text", TEXT, once(lambda: b"\xff" * BODY, **PLAIN))
    four = OF("8 MiB texts at a time", TEXT, once(lambda: words(BODY), **PLAIN), 8)
    yield four
    yield four._replace(name="8 MiB texts that are left", ending="leaves")
    yield OF(
        "8 MiB prompts at a time", DECODER, once(lambda: prompt(b'"%s"' % words(BODY - 64))), 8
    )
    yield OF(
        "8 MiB prompts that are left",
        DECODER,
        once(lambda: prompt(b'"%s"' % words(BODY - 64))),
        8,
        ending="leaves",
    )
    yield OF(
        "2.7 million empty texts", TEXT, once(lambda: texts(b'"",' * 2_700_000 + b'""', 2_700_001))
    )
    yield OF("130,000 empty texts", TEXT, once(lambda: texts(b'"",' * 130_000 + b'""', 130_001)))
    yield OF("2.7 million texts in a list", TEXT, once(lambda: b"[" + b'"",' * 2_700_000 + b'""]'))
    yield OF(
        "128 texts of 64 KiB",
        TEXT,
        once(lambda: texts(b",".join([b'"%s"' % words(65_000)] * 128), 128)),
    )
    yield OF("a surrogate as a text", TEXT, once(lambda: texts(rb'"\ud800"', 1)))
    yield OF(
        "8 MiB of escaped surrogates",
        TEXT,
        once(lambda: texts(rb'"%s"' % (rb"\ud83d\ude42" * 690_000), 1)),
    )
    yield OF(
        "64 KiB of escaped letters", ANY, once(lambda: prompt(b'"%s"' % (rb"\u0061" * 10_000)))
    )
    yield OF("a PNG of 64 million pixels as a text", TEXT, once(lambda: png(8000, 8000), **PLAIN))
    yield OF(
        "a PNG to a server without images",
        ANY,
        once(lambda: png(8000, 8000), content_type="image/png"),
    )


def _chats() -> Iterator[HostileRequest]:
    yield OF(
        "200,000 empty messages",
        DECODER,
        once(lambda: chat(b",".join([EMPTY_MESSAGE] * 200_000)), CHAT),
    )
    yield OF(
        "200,000 empty messages, 8 at a time",
        DECODER,
        once(lambda: chat(b",".join([EMPTY_MESSAGE] * 200_000)), CHAT),
        8,
    )
    part = b'{"type":"text","text":""}'
    yield OF(
        "250,000 parts of a message",
        DECODER,
        once(lambda: chat(b'{"role":"user","content":[%s]}' % b",".join([part] * 250_000)), CHAT),
    )
    yield OF(
        "2 million nulls as messages",
        DECODER,
        once(lambda: chat(b",".join([b"null"] * 1_600_000)), CHAT),
    )
    yield OF(
        "a message of 500,000 unknown fields",
        DECODER,
        once(
            lambda: chat(
                b'{"role":"user","content":"a",%s}'
                % b",".join(b'"%d":1' % i for i in range(500_000))
            ),
            CHAT,
        ),
    )
    yield OF("4 million token ids", DECODER, once(lambda: prompt(b"[%s1]" % (b"1," * 4_000_000))))
    yield OF(
        "4 million texts as a prompt",
        DECODER,
        once(lambda: prompt(b'["a"%s]' % (b',"a"' * 1_900_000))),
    )
    yield OF(
        "1 million lists as a prompt",
        DECODER,
        once(lambda: prompt(b"[[]%s]" % (b",[]" * 2_500_000))),
    )
    yield OF(
        "a million stops",
        DECODER,
        once(lambda: prompt(b'"a"', b', "stop": ["x"%s]' % (b',"x"' * 1_900_000))),
    )
    yield OF(
        "500,000 unknown settings",
        DECODER,
        once(lambda: prompt(b'"a", %s' % b",".join(b'"%d":1' % i for i in range(500_000)))),
    )
    yield OF(
        "500,000 biases",
        DECODER,
        once(
            lambda: prompt(
                b'"a"', b', "logit_bias": {%s}' % b",".join(b'"%d":1' % i for i in range(500_000))
            )
        ),
    )
    yield OF(
        "a setting's name of 8 MiB",
        DECODER,
        once(lambda: prompt(b'"a"', b', "%s": 1' % letters(BODY - 99))),
    )
    for name in ("top_p", "temperature"):
        for value in (b"1e-46", b"1e-320", b"5e-324", b"0", b"-0.0", b"1e-38", b"1e-7"):
            yield OF(
                f"{name} {value.decode()}",
                DECODER,
                once(lambda n=name, v=value: prompt(b'"a"', b', "%s": %s' % (n.encode(), v))),
            )
    for name, value in (
        ("seed", b"9" * 4300),
        ("seed", b"9" * 8_000_000),
        ("max_tokens", b"9" * 400),
        ("temperature", b"1e999"),
        ("top_p", b"NaN"),
        ("seed", b"-9223372036854775809"),
        ("n", b"1e400"),
        ("stop", b'"' + b"x" * 8_000_000 + b'"'),
        (
            "response_format",
            b'{"type": "json_schema", "json_schema": %s1%s}' % (b'{"a":' * 50_000, b"}" * 50_000),
        ),
    ):
        shown = value[:12].decode() + ("…" if len(value) > 12 else "")
        yield OF(
            f"{name} {shown} of {len(value)} bytes",
            DECODER,
            once(lambda n=name, v=value: prompt(b'"a"', b', "%s": %s' % (n.encode(), v))),
        )


def _json() -> Iterator[HostileRequest]:
    yield OF("8 MiB of brackets", ANY, once(lambda: DEEP))
    yield OF("brackets 50,000 deep as data", ANY, once(lambda: data(b"[" * 50_000 + b"]" * 50_000)))
    yield OF(
        "objects 100,000 deep", ANY, once(lambda: b'{"inputs":' * 100_000 + b"1" + b"}" * 100_000)
    )
    yield OF("4 million numbers", ANY, once(lambda: data(b"0," * 4_000_000 + b"0")))
    yield OF("2.7 million lists", ANY, once(lambda: data(b"[]," * 2_700_000 + b"[]")))
    yield OF("a number of 8 million digits", ANY, once(lambda: data(b"9" * 8_000_000)))
    yield OF(
        "2,000 numbers of 4,000 digits", ANY, once(lambda: data(b",".join([b"9" * 4000] * 2000)))
    )
    yield OF(
        "1,000 exponents of 4,000 digits",
        ANY,
        once(lambda: data(b",".join([b"1e" + b"9" * 4000] * 1000))),
    )
    yield OF("a million equal keys", ANY, once(lambda: b'{"a":1' + b',"a":1' * 1_300_000 + b"}"))
    yield OF(
        "a million keys",
        ANY,
        once(lambda: b"{" + b",".join(b'"%d":1' % i for i in range(600_000)) + b"}"),
    )
    yield OF(
        "keys with one hash",
        ANY,
        once(
            lambda: b"{" + b",".join(b'"%d":1' % (i * (2**61 - 1)) for i in range(200_000)) + b"}"
        ),
    )
    yield OF(
        "a surrogate", ANY, once(lambda: rb'{"inputs": [{"name": "\ud800"}], "prompt": "\udfff"}')
    )
    yield OF("UTF-16", ANY, once(lambda: data(b"1,2,3,4").decode().encode("utf-16")))
    yield OF("a byte order mark", ANY, once(lambda: b"\xef\xbb\xbf" + data(b"1,2,3,4")))
    yield OF("8 MiB of blanks", ANY, once(lambda: spaces(BODY)))
    yield OF("8 MiB of half a text", ANY, once(lambda: b'"' + letters(BODY - 1)))
    yield OF("8 MiB of backslashes", ANY, once(lambda: b'"' + b"\\" * (BODY - 2) + b'"'))
    yield OF(
        "100,000 tensors",
        ("tensor", "text"),
        once(
            lambda: json.dumps(
                {
                    "inputs": [
                        {"name": f"{i}", "shape": [1, 4], "datatype": "FP32", "data": [0]}
                        for i in range(100_000)
                    ]
                }
            ).encode()
        ),
    )
    yield OF("NaN and Infinity", ("tensor",), once(lambda: data(b"NaN,Infinity,-Infinity,1")))
    yield OF("booleans", ("tensor",), once(lambda: data(b"true,false,true,false")))
    yield OF(
        "an input of 2^62 elements",
        ("tensor", "text"),
        once(lambda: data(b"1", shape="[4611686018427387904, 4]")),
    )


def _bodies() -> Iterator[HostileRequest]:
    binary = ("tensor", "text")
    npz = {"content_type": "application/x-npz"}
    yield OF("an npz of 38,000 members", binary, once(lambda: npz_of_members(38_000), **npz))
    yield OF("an npz of half a zip", binary, once(lambda: npz_of_members(2)[:-30], **npz))
    yield OF(
        "an npy of 2^60 elements",
        binary,
        once(lambda: npy((2**60,)), content_type="application/x-npy"),
    )
    yield OF(
        "an npy with a header of 60 KiB",
        binary,
        once(lambda: npy([1] * 20_000), content_type="application/x-npy"),
    )
    yield OF(
        "raw bytes of a shape of 10^9",
        binary,
        once(
            lambda: bytes(16),
            content_type="application/octet-stream",
            more="X-Shape: 999999999,999999999\r\n",
        ),
    )
    yield OF(
        "a JSON length of 10^19",
        binary,
        once(lambda: b"{}", more="Inference-Header-Content-Length: 99999999999999999999\r\n"),
    )
    yield OF(
        "a JSON length of 4,000 digits",
        binary,
        once(lambda: b"{}", more=f"Inference-Header-Content-Length: {'9' * 4000}\r\n"),
    )
    yield OF(
        "a gzip bomb",
        ANY,
        once(lambda: gzip.compress(bytes(512 * MIB), 1)[:BODY], more="Content-Encoding: gzip\r\n"),
    )
    yield OF(
        "deflate",
        ANY,
        once(lambda: zlib.compress(bytes(64 * MIB)), more="Content-Encoding: deflate\r\n"),
    )
    yield OF(
        "gzip as transfer coding",
        ANY,
        raw(lambda path: head(path, "Transfer-Encoding: gzip, chunked\r\n") + b"0\r\n\r\n"),
    )
    yield OF(
        "a body of 10^18 bytes",
        ANY,
        raw(lambda path: head(path, "Content-Length: 1000000000000000000\r\n")),
    )
    yield OF(
        "a body of 10^30 bytes", ANY, raw(lambda path: head(path, f"Content-Length: {10**30}\r\n"))
    )
    yield OF(
        "100 MiB behind a length of 100 MiB",
        ANY,
        again(lambda path: head(path, f"Content-Length: {100 * MIB}\r\n"), bytes(MIB), 100),
    )
    yield OF(
        "a multipart form",
        ANY,
        once(lambda: b"--x\r\n" * 1_000_000, content_type="multipart/form-data; boundary=x"),
    )


def _http() -> Iterator[HostileRequest]:
    yield OF(
        "two lengths",
        ANY,
        raw(lambda path: head(path, "Content-Length: 2\r\nContent-Length: 3\r\n") + b"{}x"),
    )
    yield OF(
        "a length and chunks",
        ANY,
        raw(lambda path: head(path, "Content-Length: 2\r\n" + CHUNKED) + b"2\r\n{}\r\n0\r\n\r\n"),
    )
    yield OF("a negative length", ANY, raw(lambda path: head(path, "Content-Length: -1\r\n")))
    yield OF(
        "a length in hexadecimal",
        ANY,
        raw(lambda path: head(path, "Content-Length: 0x10\r\n") + bytes(16)),
    )
    yield OF(
        "chunks of one byte",
        ANY,
        again(lambda path: head(path, CHUNKED), b"1\r\nx\r\n" * 40_000, 20),
        8,
    )
    yield OF(
        "a chunk of 2^63 bytes",
        ANY,
        raw(lambda path: head(path, CHUNKED) + b"8000000000000000\r\n" + bytes(MIB)),
    )
    yield OF(
        "a chunk without an end",
        ANY,
        again(lambda path: head(path, CHUNKED) + b"fffffff\r\n", bytes(MIB), 20),
    )
    yield OF(
        "chunks with long extensions",
        ANY,
        again(lambda path: head(path, CHUNKED), b"1;%s\r\nx\r\n" % (b"x" * 30_000), 500),
    )
    yield OF(
        "a million trailers",
        ANY,
        again(lambda path: head(path, CHUNKED) + b"0\r\n", b"a: b\r\n" * 10_000, 100),
    )
    yield OF(
        "a chunk's size of 64 KiB",
        ANY,
        raw(lambda path: head(path, CHUNKED) + b"0" * 65_000 + b"1\r\nx\r\n"),
    )
    yield OF("a header of 1 MiB", ANY, raw(lambda path: head(path, f"X: {'x' * MIB}\r\n")))
    yield OF("100,000 headers", ANY, raw(lambda path: head(path, "a:\r\n" * 100_000)))
    yield OF("a path of 1 MiB", ANY, raw(lambda path: head("/" + "x" * MIB)))
    yield OF("a method of 1 MiB", ANY, raw(lambda path: b"P" * MIB + b" / HTTP/1.1\r\n\r\n"))
    yield OF(
        "a line without an end",
        ANY,
        again(lambda path: b"POST " + path.encode(), b"x" * 1000, 2000),
    )
    yield OF("line breaks", ANY, raw(lambda path: b"\r\n" * 500_000))
    yield OF("zero bytes", ANY, raw(lambda path: bytes(MIB)))
    yield OF(
        "TLS", ANY, raw(lambda path: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500))
    )
    yield OF(
        "HTTP/2's preface", ANY, raw(lambda path: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(1000))
    )
    yield OF(
        "an offered upgrade",
        ANY,
        raw(
            lambda path: (
                head(
                    path,
                    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nContent-Length: 2\r\n",
                )
                + b"{}"
            )
        ),
    )
    yield OF(
        "a folded header",
        ANY,
        raw(lambda path: head(path, "X: a\r\n b\r\nContent-Length: 2\r\n") + b"{}"),
    )
    yield OF(
        "control characters in a header", ANY, raw(lambda path: head(path, "X: a\x00\x1b[2Jb\r\n"))
    )
    yield OF("100,000 small requests", ANY, again(lambda path: HEALTH, HEALTH * 1000, 100))
    yield OF(
        "100,000 small requests, no answer read",
        ANY,
        again(lambda path: HEALTH, HEALTH * 1000, 100),
        20,
        ending="ignores",
    )
    yield OF(
        "20,000 wrong tokens",
        ANY,
        again(
            lambda path: head(path, "Content-Length: 0\r\n", "wrong"),
            head(INFER, "Content-Length: 0\r\n", "wrong") * 1000,
            20,
        ),
    )
    yield OF("1,000 connections at a time", ANY, raw(lambda path: HEALTH), 1000)
    yield OF(
        "1,000 connections that are left", ANY, raw(lambda path: HEALTH), 1000, ending="leaves"
    )
    yield OF("300 slow heads", ANY, again(lambda path: HEALTH[:-2], b"X: x\r\n", 6), 300, 0.5)
    yield OF(
        "300 slow bodies",
        ANY,
        again(lambda path: head(path, "Content-Length: 1000\r\n"), b" ", 6),
        300,
        0.5,
        "leaves",
    )
    yield OF(
        "300 slow bodies without a token",
        ANY,
        again(lambda path: head(path, "Content-Length: 1000000\r\n", "wrong"), b" ", 6),
        300,
        0.5,
        "leaves",
    )
    yield OF(
        "half-closed after the head",
        ANY,
        raw(lambda path: head(path, "Content-Length: 100\r\n")),
        50,
        ending="shuts",
    )
    yield OF(
        "half-closed after half a head", ANY, raw(lambda path: HEALTH[:20]), 50, ending="shuts"
    )
    yield OF("half-closed after a body", ANY, once(lambda: b"{}"), 50, ending="shuts")
    yield OF(
        "500 expectations",
        ANY,
        raw(lambda path: head(path, "Expect: 100-continue\r\nContent-Length: 100\r\n")),
        500,
        ending="leaves",
    )
    yield OF(
        "8 large bodies that stop half-way",
        ANY,
        raw(lambda path: head(path, f"Content-Length: {BODY}\r\n") + bytes(BODY // 2)),
        8,
        ending="leaves",
    )


def hostile_requests() -> Iterator[HostileRequest]:
    """Yield all of them; bodies are made when they are sent."""
    for group in (_texts, _chats, _json, _bodies, _http):
        yield from group()
