"""HTTP messages of the built-in server: bodies of requests as a model's inputs, and responses."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from email import message_from_bytes
from email.message import Message as FormPart
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compress.serve.worker import wire
from compress.serve.worker.tensors import TOO_LARGE, UNREADABLE, check, describe_error
from compress.serve.worker.wire import (
    HEADER_LENGTH,
    JSON,
    MAX_PIXELS,
    create_readers,
    requested_outputs,
)

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from compress.serve.http.options import Limits
    from compress.serve.worker.tensors import Array, Named, Specs
    from compress.serve.worker.wire import Readers

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    Headers = dict[str, str]

logger = logging.getLogger(__name__)

PART_BYTES = 256 * 1024  # of a body, each sent once the client has read most of the one before
UNSPECIFIED = ("", "application/x-www-form-urlencoded")  # where none is given, and of curl's -d
FORM = "multipart/form-data"
BODY_COPIES = 3  # a body, and a text that it holds, of two bytes for each character
TOKEN_BYTES = 2048  # memory of a token, and of its text, while a text is tokenized
PIXEL_BYTES = 10  # Pillow takes 4 bytes for each, twice while it converts an image
LONGEST_TEXT = 512  # tokens of a text, on average, of a model that takes any number
EXTRA_COMMAS = 1024  # commas of a JSON request besides those between numbers, at most


@dataclass
class Response:
    """An HTTP response."""

    status: int = 200
    body: bytes = b""
    headers: Headers = field(default_factory=dict)
    rows: int = 0
    """Rows of the model's answer, for the metrics."""


class HttpError(Exception):
    """An error response, raised."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        """Build the response; `_` in a header's name stands for `-`."""
        super().__init__(message)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        body = json.dumps({"error": message}).encode()
        self.response = Response(status, body, {"content-type": JSON, **names})

    def __reduce__(self) -> Any:
        return type(self).__new__, (type(self), *self.args), vars(self)


async def response_of(handler: Awaitable[Response]) -> Response:
    """Await a handler's response; turn what it raises into an error response."""
    try:
        return await handler
    except Exception as error:  # noqa: BLE001 - a bug must not leave the client without a response
        return error_response(error)


def error_response(error: Exception) -> Response:
    """Return the response to what a request's handler raised; log what is no client's mistake."""
    if isinstance(error, HttpError):
        return error.response
    logger.error("a request failed", exc_info=error)
    return HttpError(500, "the server failed; its log says why").response


async def send_response(scope: Message, send: Send, response: Response) -> None:
    """Send a response, no faster than the client reads it."""
    headers = {**response.headers, "content-length": str(len(response.body))}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": response.status, "headers": pairs})
    body = b"" if scope["method"] == "HEAD" else response.body
    for start in range(0, max(len(body), 1), PART_BYTES):
        end = start + PART_BYTES
        part = body[start:end]  # not a memoryview: ASGI requires bytes
        await send({"type": "http.response.body", "body": part, "more_body": end < len(body)})


async def run_unchunked(
    application: Any, cycle: RequestResponseCycle, scope: Message, receive: Receive, send: Send
) -> None:
    """Run an application for HTTP/1.0, where the connection's end ends a response without a length.

    uvicorn (0.54) sends it in chunks, which such a client does not know (RFC 9112, section 6.1).
    """
    has_length = True

    async def send_unchunked(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name == b"content-length" for name, _ in message["headers"])
            cycle.chunked_encoding = None if has_length else False
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))  # of this part
        await send(message)

    await application(scope, receive, send_unchunked)


def response_bytes(
    response: Response, default_headers: Sequence[tuple[bytes, bytes]], *, keep_alive: bool
) -> bytes:
    """Return a whole HTTP/1.1 response, to be sent at once: two parts wake the client twice."""
    headers = {**response.headers, "content-length": str(len(response.body))}
    if not keep_alive:
        headers["connection"] = "close"
    lines = [f"{name.lower()}: {value}\r\n" for name, value in headers.items()]
    defaults = [b"%s: %s\r\n" % pair for pair in default_headers]
    status = f"HTTP/1.1 {response.status} {HTTPStatus(response.status).phrase}\r\n".encode()
    head = [status, *defaults, "".join(lines).encode(), b"\r\n"]
    return b"".join([*head, response.body])


def close_if_continue_expected(headers: Headers) -> Headers:
    """Return the headers to add to a response that is sent before the request's body is read."""
    # A client that sent `Expect: 100-continue` may send its body after an error or not, so that the
    # start of its next request could not be found.
    waits = headers.get("expect", "").lower() == "100-continue"
    return {"connection": "close"} if waits else {}


@dataclass(frozen=True)
class RequestDecoder:
    """Reads and checks what requests to one model hold."""

    specs: Specs
    outputs: Sequence[str]
    labels: Sequence[str]
    """Outputs that an answer holds if they are requested by name."""
    max_rows: int
    readers: Readers = field(default_factory=dict)

    def decode(self, headers: Headers, body: bytes | bytearray) -> tuple[list[Array], Named]:
        """Return the model's inputs, and which outputs an Open Inference Protocol request wants."""
        content_type = content_type_of(headers)
        if content_type == FORM:
            content_type, body = form_field(headers["content-type"], body)
        if content_type in UNSPECIFIED:
            content_type = wire.JSON  # as the protocol has it; NVIDIA's client sends no type
        json_bytes = headers.get(HEADER_LENGTH, "")
        if json_bytes or content_type == wire.JSON:
            # Counted before it is parsed: numbers take many times their text in memory.
            is_size = json_bytes.isdecimal() and len(json_bytes) < 20
            end = int(json_bytes) if is_size else None
            most = EXTRA_COMMAS + most_numbers(self.specs, self.max_rows)
            if wire.TEXT in self.readers:
                most += EXTRA_COMMAS * self.max_rows  # within texts
            if body.count(b",", 0, end) > most:
                message = f"the body holds more values than {self.max_rows} rows of the inputs have"
                raise HttpError(TOO_LARGE, message)
        try:
            arrays, asked = wire.decode(body, content_type, headers, self.specs, self.readers)
            check(arrays, self.specs, self.max_rows)
            if not asked:
                return arrays, {}
            labels = self.labels if asked.get("outputs") else ()
            return arrays, requested_outputs(asked, [*self.outputs, *labels])
        except MemoryError:  # numpy tries to make an array as large as a header says
            raise HttpError(TOO_LARGE, "the body takes too much memory to read") from None
        except Exception as error:
            raise HttpError(*describe_error(error)) from error


def with_readers(decoder: RequestDecoder, forms: Named, folder: Path) -> RequestDecoder:
    """Return a decoder that takes texts and images, too, by settings and files of a folder."""
    readers = create_readers({**forms, "max_rows": decoder.max_rows}, decoder.specs, folder)
    return replace(decoder, readers=readers)


def memory_needed(forms: Named, limits: Limits) -> int:
    """Return the bytes that reading the largest texts, images and sounds takes."""
    image = MAX_PIXELS * PIXEL_BYTES if forms.get("image") or forms.get("audio") else 0
    most_tokens = forms["text"]["max_length"] or LONGEST_TEXT if forms.get("text") else 0
    return BODY_COPIES * limits.body_bytes + max(image, limits.rows * most_tokens * TOKEN_BYTES)


def content_type_of(headers: Headers) -> str:
    """Return the Content-Type without parameters, in lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def form_field(content_type: str, body: bytes | bytearray) -> tuple[str, bytes | bytearray]:
    """Return type and content of the field `data` of a form, as TorchServe's clients send one."""
    head = FormPart()
    head["content-type"] = content_type
    boundary = str(head.get_param("boundary", "")).encode("latin-1", "replace")
    for part in (b"\r\n" + body).split(b"\r\n--" + boundary)[1:-1] if boundary else ():
        fields, _, content = part.removeprefix(b"\r\n").partition(b"\r\n\r\n")
        found = message_from_bytes(bytes(fields))
        if found.get_param("name", header="content-disposition") in ("data", "body"):
            return found.get("content-type", wire.RAW).partition(";")[0].strip().lower(), content
    raise HttpError(UNREADABLE, wire.NO_BODY)


def most_numbers(specs: Specs, rows: int) -> float:
    """Return the most numbers that the inputs of `rows` rows hold; infinite for unbounded axes."""
    # Rows are counted on the first input's first axis, where it has a name.
    row_axis = next(iter(specs[0]["shape"]), None)
    total = 0.0
    for spec in specs:
        bounds = {axis: most or math.inf for axis, (_, most) in spec.get("bounds", {}).items()}
        bounds |= {row_axis: rows}
        sizes = [d if isinstance(d, int) else bounds.get(d, math.inf) for d in spec["shape"]]
        total += math.prod(sizes)
    return total
