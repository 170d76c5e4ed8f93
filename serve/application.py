"""The built-in server's answers: Open Inference Protocol v2 as an ASGI application.

It is plain ASGI: a framework around these few paths cost more than a small model's answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from compress import __version__
from serve import open_inference
from serve.interface import example
from serve.metrics import Metrics
from serve.worker import wire
from serve.worker.tensors import check

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from serve.batching import Batcher
    from serve.open_inference import Wanted
    from serve.options import Limits
    from serve.served import ServedModel
    from serve.worker.tensors import Array

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    Headers = dict[str, str]

logger = logging.getLogger(__name__)

INVALID_VALUES = ("InvalidArgument", "IndexError")
"""What runtimes raise for values that shapes and types do not exclude, such as an index beyond a
table; of TorchScript and compiled code, everything is a RuntimeError."""
DISCARDED = 8
"""A body that is refused is read on up to this many times the limit: many clients read no answer
before they have sent everything."""


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
        self.answer = Answer(status, body, {"content-type": wire.JSON, **names})


class Application:
    """Answers requests for one model."""

    def __init__(self, model: ServedModel, batcher: Batcher, limits: Limits, token: str) -> None:
        """Remember what to serve.

        Args:
            model: the model, proven and warm.
            batcher: answers with it.
            limits: what is refused.
            token: what clients must know, for all but the two paths of health.
        """
        self.model = model
        self.limits = limits
        self.batcher = batcher
        self.metrics = Metrics(model.name, lambda: batcher.depth)
        self.specs = model.signature.announced()
        self.outputs = [output.name for output in model.signature.outputs]
        self._inside = 0  # requests whose body is read or which are answered
        self._authorization = f"Bearer {token}".encode()
        base = f"/v2/models/{model.name}"
        self._infer_paths = (f"{base}/infer", f"{base}/versions/1/infer")
        ready = {"name": model.name, "ready": True}
        metadata = open_inference.model_metadata(model.name, model.kind, model.interface)
        server: dict[str, Any] = {"name": "compress", "version": __version__}
        server |= {"extensions": [*open_inference.EXTENSIONS]}
        self._open = {"/v2/health/live": {"live": True}, "/v2/health/ready": {"ready": True}}
        self._told: dict[str, Any] = {"/v2": server, "/v2/": server, base: metadata}
        self._told |= {f"{base}/ready": ready, f"{base}/versions/1": metadata}
        self._told |= {f"{base}/versions/1/ready": ready, "/metrics": None}

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        began = time.perf_counter()
        path = scope["path"]
        try:
            answer = await self._answer(scope, receive)
        except Refused as refused:
            answer = refused.answer
        except Exception:
            logger.exception("a request failed")
            answer = Refused(500, "the server failed; its log says why").answer
        if path in self._infer_paths:
            self.metrics.count(answer.status, answer.rows, time.perf_counter() - began)
        headers = {**answer.headers, "content-length": str(len(answer.body))}
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        start = {"type": "http.response.start", "status": answer.status, "headers": pairs}
        await send(start)
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Message, receive: Receive) -> Answer:
        path, method = scope["path"], scope["method"]
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        if path in self._open:
            return _json(self._open[path])
        given = headers.get("authorization", "").encode()
        if not secrets.compare_digest(given, self._authorization):
            closing = await self._discard(headers, receive)
            message = "found no valid token, expected the header Authorization: Bearer TOKEN"
            raise Refused(401, message, www_authenticate="Bearer", **closing)
        if path in self._infer_paths:
            if method != "POST":
                raise Refused(405, f"{method}: expected POST", allow="POST")
            return await self._infer(headers, receive)
        if path not in self._told:
            closing = await self._discard(headers, receive)
            message = f"{path[:200]}: not here; expected {self._infer_paths[0]}"
            raise Refused(404, message, **closing)
        if method not in ("GET", "HEAD"):
            raise Refused(405, f"{method[:20]}: expected GET", allow="GET, HEAD")
        if path == "/metrics":
            return Answer(200, self.metrics.text(), {"content-type": self.metrics.content_type})
        return _json(self._told[path])

    async def _infer(self, headers: Headers, receive: Receive) -> Answer:
        if max(self.batcher.depth, self._inside) >= self.limits.queue:
            closing = await self._discard(headers, receive)
            message = f"{self.limits.queue} requests wait, which is all that may; try again"
            raise Refused(503, message, retry_after="1", **closing)
        arrays: list[Array] | None = None
        self._inside += 1
        try:
            async with asyncio.timeout(self.limits.seconds):
                body = await self._body(headers, receive)
                arrays, wanted = self._understood(headers, body)
                outputs = await self._answered(arrays)
        except TimeoutError:
            seconds = f"{self.limits.seconds:g} s"
            if arrays is None:
                message = f"the body was not here after {seconds}"
                raise Refused(408, message, connection="close") from None
            raise Refused(504, f"the model did not answer within {seconds}") from None
        finally:
            self._inside -= 1
        body, written = self._written(headers, wanted, outputs)
        return Answer(200, body, written, len(arrays[0]) if arrays[0].ndim else 1)

    async def _answered(self, arrays: list[Array]) -> list[Array]:
        """Return the outputs; a failure is the request's, where the model still answers another."""
        try:
            return await self.batcher.submit(arrays)
        except Exception as error:
            if type(error).__name__ not in INVALID_VALUES:
                try:
                    await self.batcher.submit(example(self.model.signature, rows=1))
                except Exception:  # noqa: BLE001 - whatever it is, the model is broken
                    raise Refused(500, f"inference failed: {type(error).__name__}") from error
            first = str(error).strip().partition("\n")[0][:200]
            raise Refused(400, f"the model refuses these values: {first}") from error

    def _understood(self, headers: Headers, body: bytes) -> tuple[list[Array], Wanted | None]:
        """Return what the model can be given, and how a request of the protocol is answered."""
        try:
            arrays, wanted = self._read(headers, body)
            check(arrays, self.specs, self.limits.rows)
        except Exception as error:
            raise _unreadable(error) from error
        return arrays, wanted

    def _read(self, headers: Headers, body: bytes) -> tuple[list[Array], Wanted | None]:
        if headers.get("content-encoding", "identity") != "identity":
            found = headers["content-encoding"][:40]
            raise Refused(415, f"Content-Encoding is {found}, expected none")
        if open_inference.HEADER_LENGTH in headers:
            length = headers[open_inference.HEADER_LENGTH]
            value, raw = open_inference.split(body, length)
            arrays = open_inference.arrays_of(value, raw, self.specs)
            return arrays, open_inference.wanted_of(value, self.outputs)
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        arrays, asked = wire.decode(body, content_type, headers, self.specs, {})
        return arrays, open_inference.wanted_of(asked, self.outputs) if asked else None

    def _written(
        self, headers: Headers, wanted: Wanted | None, outputs: list[Array]
    ) -> tuple[bytes, Headers]:
        """Return the answer's body and headers: by the protocol, or as Accept says."""
        name = self.model.name
        named = dict(zip(self.outputs, outputs, strict=True))
        for output, array in named.items():
            if array.dtype.kind == "f" and np.isnan(array).any():
                raise Refused(500, f"the model answered NaN in {output}")
        text: str | bytes
        try:
            if wanted is not None:
                text, written = open_inference.encode(name, named, wanted)
            else:
                accept = headers.get("accept", "").lower()
                text, written = wire.encode(named, accept, {}, name, None)
        except ValueError as error:
            raise _unreadable(error) from error
        if self.model.interface.rows_stay_first:
            written["X-Batch-Axis"] = "0"
        return text.encode() if isinstance(text, str) else text, written

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self.limits.body_bytes
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            closing = await self._discard(headers, receive)
            message = f"the body has {declared} bytes, expected at most {limit}"
            raise Refused(413, message, **closing)
        parts: list[bytes] = []
        left, more = limit, True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                raise Refused(400, "the client left before its body was here")
            parts.append(part.get("body", b""))
            left -= len(parts[-1])
            more = bool(part.get("more_body"))
            if left < 0:
                closing = await self._discard(headers, receive) if more else {}
                raise Refused(413, f"the body has more than {limit} bytes", **closing)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _discard(self, headers: Headers, receive: Receive) -> Headers:
        """Read what is refused, so that the client comes to read why; not for ever.

        Returns the header that closes the connection where some of it was left unread.
        """
        closing = {"connection": "close"}
        if headers.get("expect", "").lower() == "100-continue":
            return closing  # the client waits for leave to send
        left = DISCARDED * self.limits.body_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(self.limits.seconds):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body"):
                        return {}
        return closing


def _json(value: Any) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"content-type": wire.JSON})


def _unreadable(error: Exception) -> Refused:
    """Return the answer to what a codec refused, or could not read in any way."""
    if isinstance(error, Refused):
        return error
    if type(error) is ValueError and len(error.args) == 2:
        status, message = error.args
        return Refused(status, message)
    return Refused(400, f"the body cannot be read: {type(error).__name__}: {str(error)[:160]}")
