"""Answers of the built-in server, and how they are sent."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from serve.worker.http_errors import describe_error
from serve.worker.wire import JSON

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, MutableMapping

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    Headers = dict[str, str]

logger = logging.getLogger(__name__)

ANSWER_PART_BYTES = 256 * 1024
"""Answers are sent in parts of this size, each once the client has read most of the one before."""


@dataclass
class Answer:
    """A response."""

    status: int = 200
    body: bytes = b""
    headers: Headers = field(default_factory=dict)
    rows: int = 0


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        """Say why, and add headers to the answer."""
        super().__init__(message)
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        body = json.dumps({"error": message}).encode()
        self.answer = Answer(status, body, {"content-type": JSON, **names})


async def attempted(answering: Coroutine[Any, Any, Answer]) -> Answer:
    """Return what is answered, also where a request is refused or the server failed."""
    try:
        return await answering
    except Refused as refused:
        return refused.answer
    except Exception:
        logger.exception("a request failed")
        return Refused(500, "the server failed; its log says why").answer


def refused(error: Exception) -> Refused:
    """Return the answer to what a codec refused, or could not read in any way."""
    status, message = describe_error(error)
    return Refused(status, message)


async def send_answer(scope: Message, send: Send, answer: Answer) -> None:
    """Send an answer, no faster than the client reads it."""
    headers = {**answer.headers, "content-length": str(len(answer.body))}
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": pairs})
    body = b"" if scope["method"] == "HEAD" else answer.body
    for start in range(0, max(len(body), 1), ANSWER_PART_BYTES):
        end = start + ANSWER_PART_BYTES
        part = body[start:end]  # not a memoryview: ASGI has bytes
        await send({"type": "http.response.body", "body": part, "more_body": end < len(body)})


def unread(headers: Headers) -> Headers:
    """Return what is to be said where a request is refused before its body is read.

    A client that waits for leave to send may send the body or not; what follows would be unclear.
    """
    waits = headers.get("expect", "").lower() == "100-continue"
    return {"connection": "close"} if waits else {}
