"""HTTP responses of the built-in server, and how they are sent over ASGI."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from compress.serve.worker.wire import JSON

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping, Sequence

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    Headers = dict[str, str]

logger = logging.getLogger(__name__)

PART_BYTES = 256 * 1024
"""Bodies are sent in parts of this size, each once the client has read most of the one before."""


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
    """Run an application for HTTP/1.0: the connection's end ends a response without a length.

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
