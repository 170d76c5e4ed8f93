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

from pydantic_core import from_json

from compress import __version__
from serve import open_inference
from serve.interface import example
from serve.metrics import Metrics
from serve.worker import wire
from serve.worker.inference_protocol import HEADER_LENGTH, wanted_of
from serve.worker.refusals import TOO_LARGE, UNREADABLE, blame, told, what_failed
from serve.worker.tensors import check

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from serve.batching import Batcher
    from serve.options import Limits
    from serve.served import ServedModel
    from serve.worker.tensors import Array, Named

    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    Headers = dict[str, str]

logger = logging.getLogger(__name__)

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
        self._example = example(model.signature, rows=1)
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
            return self._state(self._open[path])
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
        return self._state(self._told[path])

    def _state(self, told: Named) -> Answer:
        """Return what is told of the server: not ready, while every call of the model hangs."""
        hangs = "ready" in told and self.batcher.hangs(self.limits.seconds)
        body = json.dumps({**told, "ready": False} if hangs else told).encode()
        return Answer(503 if hangs else 200, body, {"content-type": wire.JSON})

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
        """Return the outputs; a failure is the request's, where the model still works."""
        outputs: list[Array] | Exception
        try:
            outputs = await self.batcher.submit(arrays)
        except Exception as error:  # noqa: BLE001 - runtimes raise what they like
            outputs = error
        what = what_failed(outputs, self.outputs)
        if what or isinstance(outputs, Exception):
            raise _refused(blame(what, works=await self._works()))
        return outputs

    async def _works(self) -> bool:
        """Return whether the model answers its example."""
        try:
            outputs = await self.batcher.submit(self._example)
        except Exception:  # noqa: BLE001 - whatever it is, the model is broken
            return False
        return not what_failed(outputs, self.outputs)

    def _understood(self, headers: Headers, body: bytes) -> tuple[list[Array], Named]:
        """Return what the model can be given, and how a request of the protocol is answered."""
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        given: Any = body
        if content_type == wire.JSON and HEADER_LENGTH not in headers:
            # Four times as fast as json, which holds up all others; what it refuses, json names.
            with suppress(ValueError):
                given = from_json(body, allow_inf_nan=False)
        try:
            arrays, asked = wire.decode(given, content_type, headers, self.specs, {})
            check(arrays, self.specs, self.limits.rows)
            return arrays, wanted_of(asked, self.outputs) if asked else {}
        except Exception as error:
            raise _refused(error) from error

    def _written(
        self, headers: Headers, wanted: Named, outputs: list[Array]
    ) -> tuple[bytes, Headers]:
        """Return the answer's body and headers: by the protocol, or as Accept says."""
        named = dict(zip(self.outputs, outputs, strict=True))
        accept = headers.get("accept", "").lower()
        try:
            body, written = wire.encode(named, accept, wanted, self.model.name, None)
        except ValueError as error:
            raise _refused(error) from error
        if self.model.interface.rows_stay_first:
            written["X-Batch-Axis"] = "0"
        return body, written

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        limit = self.limits.body_bytes
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            closing = await self._discard(headers, receive)
            message = f"the body has {declared} bytes, expected at most {limit}"
            raise Refused(TOO_LARGE, message, **closing)
        parts: list[bytes] = []
        left, more = limit, True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                raise Refused(UNREADABLE, "the client left before its body was here")
            parts.append(part.get("body", b""))
            left -= len(parts[-1])
            more = bool(part.get("more_body"))
            if left < 0:
                closing = await self._discard(headers, receive) if more else {}
                raise Refused(TOO_LARGE, f"the body has more than {limit} bytes", **closing)
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


def _refused(error: Exception) -> Refused:
    """Return the answer to what a codec refused, or could not read in any way."""
    status, message = told(error)
    return Refused(status, message)
