"""The Open Inference Protocol v2 as an ASGI application: the built-in server's routes.

It is plain ASGI: a web framework around these few paths took longer than a small model's inference.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from compress import __version__
from serve.http.inference import (
    CLIENT_CLOSED,
    SMALL_BYTES,
    Inference,
    WholeRequest,
    content_type_of,
)
from serve.http.responses import (
    HttpError,
    Response,
    close_if_continue_expected,
    response_of,
    send_response,
)
from serve.worker.http_errors import TOO_LARGE, UNREADABLE
from serve.worker.oip import DATATYPES
from serve.worker.wire import JSON

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from serve.http.dynamic_batcher import Batcher
    from serve.http.loaded_model import ServedModel
    from serve.http.options import Limits
    from serve.http.responses import Headers, Message, Receive, Send
    from serve.packaging.model_interface import Interface
    from serve.worker.tensors import Named

LARGE_BODIES = 3
"""Large bodies in memory are bounded by so many times the largest; the others wait in the kernel's
socket buffers."""
SPECIAL_HEADERS = frozenset({"expect", "transfer-encoding", "upgrade"})
"""Of requests that `WholeRequest` does not answer."""


class Application:
    """Answers requests for one model."""

    def __init__(self, model: ServedModel, batcher: Batcher, limits: Limits, token: str) -> None:
        """Create the application; all but the two health paths require the bearer token."""
        self.inference = Inference(model, batcher, limits)
        self._large_bodies = ByteSemaphore(LARGE_BODIES * limits.body_bytes)
        self._authorization = f"Bearer {token}".encode()
        base = f"/v2/models/{model.name}"
        self._infer_paths = (f"{base}/infer", f"{base}/versions/1/infer")
        ready = {"name": model.name, "ready": True}
        metadata = model_metadata(model.name, model.kind, model.interface)
        server: dict[str, Any] = {"name": "compress", "version": __version__}
        server |= {"extensions": ["binary_tensor_data"]}
        self._public = {"/v2/health/live": {"live": True}, "/v2/health/ready": {"ready": True}}
        self._private: dict[str, Any] = {"/v2": server, "/v2/": server, base: metadata}
        self._private |= {f"{base}/ready": ready, f"{base}/versions/1": metadata}
        self._private |= {f"{base}/versions/1/ready": ready, "/metrics": None}

    def close(self) -> None:
        """End what the requests share."""
        self.inference.close()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = headers_of(scope)
        if scope["path"] not in self._infer_paths:
            await send_response(scope, send, await response_of(self._get(scope, headers)))
            return
        start, count = time.perf_counter(), self.inference.metrics.count
        self.inference.in_progress += 1
        try:
            response = await response_of(self._infer(scope["method"], headers, receive))
            count(response.status, response.rows, time.perf_counter() - start)
            await send_response(scope, send, response)
        except asyncio.CancelledError:
            count(CLIENT_CLOSED, 0, time.perf_counter() - start)
            raise
        finally:
            self.inference.in_progress -= 1

    def accept_whole(
        self, scope: Message, respond: Callable[[Response], None]
    ) -> WholeRequest | None:
        """Return a small inference request that may begin once its body is received, else None."""
        if scope["method"] != "POST" or scope["path"] not in self._infer_paths:
            return None
        headers, limit = headers_of(scope), self.inference.limits.body_bytes
        if (
            not 0 < int(headers.get("content-length", 0)) <= min(SMALL_BYTES, limit)
            or not SPECIAL_HEADERS.isdisjoint(headers)
            or self._has_reader(headers)
        ):
            return None
        try:
            self._admit(headers, self.inference.in_progress)
        except HttpError:
            return None  # the error is sent before the body is received
        return WholeRequest(self.inference, headers, respond)

    def _admit(self, headers: Headers, others: int) -> None:
        """Refuse a request that is not from the token's owner, or if too many others wait."""
        self._check_token(headers)
        # Others may still be read, and not be queued yet.
        most = self.inference.limits.queue
        if max(self.inference.batcher.depth, others) >= most:
            message = f"{most} requests wait, the most that may; try again"
            raise HttpError(503, message, retry_after="1", **close_if_continue_expected(headers))

    def _check_token(self, headers: Headers) -> None:
        token = headers.get("authorization", "").encode()
        # In constant time: how long it takes tells nothing of the token.
        if not secrets.compare_digest(token, self._authorization):
            message = "found no valid token, expected the header Authorization: Bearer TOKEN"
            closing = close_if_continue_expected(headers)
            raise HttpError(401, message, www_authenticate="Bearer", **closing)

    async def _get(self, scope: Message, headers: Headers) -> Response:
        """Answer health, metadata and metrics requests."""
        path, method = scope["path"], scope["method"]
        if path in self._public:
            return self._json_response(self._public[path])
        self._check_token(headers)
        if path not in self._private:
            message = f"{path[:200]}: not here; expected {self._infer_paths[0]}"
            raise HttpError(404, message, **close_if_continue_expected(headers))
        if method not in ("GET", "HEAD"):
            message = f"{method[:20]}: expected GET"
            raise HttpError(405, message, allow="GET, HEAD", **close_if_continue_expected(headers))
        if path == "/metrics":
            text = await self.inference.run_in_thread(True, self.inference.metrics.text)
            return Response(200, text, {"content-type": self.inference.metrics.content_type})
        return self._json_response(self._private[path])

    def _json_response(self, content: Named) -> Response:
        """Return the content; `ready: false` and 503 while every call of the model hangs."""
        hangs = "ready" in content and self.inference.batcher.hangs(self.inference.limits.seconds)
        body = json.dumps({**content, "ready": False} if hangs else content).encode()
        return Response(503 if hangs else 200, body, {"content-type": JSON})

    async def _infer(self, method: str, headers: Headers, receive: Receive) -> Response:
        inference = self.inference
        self._check_token(headers)
        closing = close_if_continue_expected(headers)
        if method != "POST":
            raise HttpError(405, f"{method[:20]}: expected POST", allow="POST", **closing)
        self._admit(headers, inference.in_progress - 1)  # this request is in progress already
        limit = inference.limits.body_bytes
        # A chunked body does not say its size: it counts as the largest.
        size = limit if "transfer-encoding" in headers else int(headers.get("content-length", 0))
        if size > limit:
            message = f"the body has {size} bytes, expected at most {limit}"
            raise HttpError(TOO_LARGE, message, **closing)
        reserved = self._large_bodies.reserve(size) if size > SMALL_BYTES else nullcontext()
        late = 503
        try:
            async with asyncio.timeout(inference.limits.seconds), reserved:
                late = 408
                body = await self._read_body(receive)
                # A small image may be millions of pixels.
                in_thread = len(body) > SMALL_BYTES or self._has_reader(headers)
                decoded = inference.run_in_thread(in_thread, inference.decode, headers, body)
                arrays, wanted = await decoded
                late = 504
                outputs = await inference.batcher.outputs(arrays)
        except TimeoutError:
            raise inference.late_error(late) from None
        return await inference.respond(headers, wanted, arrays, outputs)

    def _has_reader(self, headers: Headers) -> bool:
        """Return whether a body is a text or an image."""
        return content_type_of(headers) in self.inference.model.readers

    async def _read_body(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        bytes_left, more = self.inference.limits.body_bytes, True
        while more:
            part = await receive()
            if part["type"] == "http.disconnect":
                raise HttpError(UNREADABLE, "the client disconnected before its body was received")
            parts.append(part.get("body", b""))
            bytes_left -= len(parts[-1])
            more = bool(part.get("more_body"))
            if bytes_left < 0:  # a chunked one: others were refused by their Content-Length
                message = f"the body has more than {self.inference.limits.body_bytes} bytes"
                raise HttpError(TOO_LARGE, message)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def headers_of(scope: Message) -> Headers:
    """Return a request's headers, their names in lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def model_metadata(name: str, kind: str, interface: Interface) -> dict[str, Any]:
    """Return the response to ``GET /v2/models/{name}``."""
    inputs, outputs = (
        [
            {"name": each.name, "datatype": DATATYPES[each.dtype], "shape": [*each.shape]}
            for each in tensors
        ]
        for tensors in (interface.inputs, interface.outputs)
    )
    described = {"name": name, "versions": ["1"], "platform": kind}
    return described | {"inputs": inputs, "outputs": outputs}


class ByteSemaphore:
    """Bounds the bytes that requests hold together; the others wait, first in, first out."""

    def __init__(self, capacity: int) -> None:
        """Create a semaphore of so many bytes."""
        self._capacity = self._free = capacity
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, count: int) -> AsyncIterator[None]:
        """Wait until `count` bytes are free, at most the capacity, and reserve them."""
        count = min(count, self._capacity)  # more would never be free
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((count, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            # Also after a cancellation: before the turn came, or in it.
            if turn.done() and not turn.cancelled():
                self._free += count
            else:
                turn.cancel()
            self._admit()

    def _admit(self) -> None:
        while self._queue:
            count, turn = self._queue[0]
            if not turn.cancelled():
                if count > self._free:
                    return
                self._free -= count
                turn.set_result(None)
            self._queue.popleft()
